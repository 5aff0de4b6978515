"""Tells instruments what happened; one that raises is taken out, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from inspect import iscoroutinefunction
from typing import Any

from .abc import Instrument

__all__ = ["Instruments"]

_HOOKS = [name for name in vars(Instrument) if not name.startswith("_")]
_log = logging.getLogger("rollnest")


class Instruments:
    """Calls only what an instrument overrides, so hooks that nobody uses cost one lookup."""

    def __init__(self, instruments: Sequence[Instrument]) -> None:
        for instrument in instruments:
            if not isinstance(instrument, Instrument):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"instruments must be Instrument objects, got {instrument!r}")
            for hook in _HOOKS:
                if iscoroutinefunction(getattr(instrument, hook)):
                    raise TypeError(f"{hook} of {instrument!r} must be a plain method, not async")
        self._listeners: dict[str, list[Instrument]] = {}
        for hook in _HOOKS:
            self._listeners[hook] = [
                i for i in instruments if getattr(type(i), hook) is not getattr(Instrument, hook)
            ]

    def add(self, instrument: Instrument) -> None:
        """Adds one that hears only what it overrides, after the others."""
        for hook, listeners in self._listeners.items():
            if getattr(type(instrument), hook) is not getattr(Instrument, hook):
                listeners.append(instrument)

    def hears(self, hook: str) -> bool:
        """Whether anybody hears a hook."""
        return bool(self._listeners[hook])

    def tell(self, hook: str, *args: Any) -> None:
        """Calls one hook of every instrument that has it."""
        listening = self._listeners[hook]
        if not listening:
            return
        for instrument in listening[:]:
            try:
                getattr(instrument, hook)(*args)
            except Exception:
                # Watching must not change what is watched; the log has the traceback.
                for listeners in self._listeners.values():
                    if instrument in listeners:
                        listeners.remove(instrument)
                _log.exception("instrument %r raised in %s and is taken out", instrument, hook)
