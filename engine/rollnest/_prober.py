"""Probes a policy server that may be down, one request at a time, until it answers or time is up."""

from __future__ import annotations

import logging
from collections.abc import Callable

from anyio import move_on_after

from ._attempt import Attempt
from ._gate import Gate
from ._instruments import Instruments
from ._outage import Outage
from ._stray import is_stray
from .abc import InferenceController
from .errors import InferenceError

__all__ = ["Prober"]

_log = logging.getLogger("rollnest")

_FIRST_WAIT = 0.5  # seconds between two probes; doubled each time
_SHORTEST_WAIT = 1e-3  # what is left may be less than a clock can tell
_LONGEST_WAIT = 30.0
_PATIENCE = 60.0  # seconds for one probe


class Prober:
    """Probes while the gate is barred. One task runs it, the engine's own."""

    def __init__(
        self,
        outage: Outage,
        *,
        gate: Gate,
        controller: InferenceController,
        instruments: Instruments,
        on_over: Callable[[tuple[Exception, ...]], None],
    ) -> None:
        self._outage = outage
        self._gate = gate
        self._controller = controller
        self._instruments = instruments
        self._on_over = on_over
        self._number = 0

    async def run(self) -> None:
        """Probes whenever the gate is barred, for ever, or until an outage took too long.

        Cancellation: a probe in flight is cancelled.
        """
        outage = self._outage
        with outage.bell:
            while True:
                if self._gate.barred and not await self._until_answered():
                    self._on_over(outage.causes)
                    return
                await outage.bell.wait()

    async def _until_answered(self) -> bool:
        """Returns whether a probe was answered, before time was up."""
        outage, wait = self._outage, _FIRST_WAIT
        while True:
            answered = await self._probe(min(_PATIENCE, outage.left))
            if answered:
                return True
            if answered is None:
                continue  # a pause cut it: it waits for the end of that
            if outage.left <= 0:
                return False
            await self._rest(min(wait, max(outage.left, _SHORTEST_WAIT)))
            wait = min(2 * wait, _LONGEST_WAIT)

    async def _rest(self, seconds: float) -> None:
        """Waits, or until for the first time a request has worked, which is something to probe with."""
        outage = self._outage
        known = outage.good is not None
        with move_on_after(seconds):
            while known or outage.good is None:
                await outage.bell.wait()

    async def _probe(self, patience: float) -> bool | None:
        """Sends one probe; returns whether it was answered, `None` if a pause came in between."""
        gate, outage = self._gate, self._outage
        await gate.wait_unpaused()
        epoch, mark = gate.epoch, outage.failures
        probe = outage.probe(self._number)
        self._number += 1
        error: Exception = TimeoutError(f"no answer to a probe within {patience:g} s")
        begun = False

        def build() -> Attempt:
            nonlocal begun
            begun = True
            self._instruments.tell("turn_started", probe)
            return probe

        try:
            with move_on_after(patience):
                await gate.probe(build, self._controller.generate)
        except Exception as raised:
            error = raised
        except BaseException as raised:
            if not is_stray(raised):
                raise
            error = InferenceError("the controller cancelled the request itself", retryable=True)
        finally:
            if begun:
                self._instruments.tell("turn_ended", probe)
        if probe.received or (isinstance(error, InferenceError) and not error.retryable):
            outage.answered(mark)
            return True
        if gate.closed or gate.epoch != epoch:
            return None
        outage.unanswered(error)
        return False
