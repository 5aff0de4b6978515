"""What is sent to an actor must be picklable; what is not is named before anything is sent."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pickle import PicklingError
from typing import Any, cast

from ray import cloudpickle

__all__ = ["check_picklable", "naming_culprit"]


@contextmanager
def naming_culprit(name: str, value: object) -> Generator[None]:
    """For the block in which something is pickled: if that fails, the error names what can't be.

    Raises:
        TypeError: It can't be pickled; the message says which part of it.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, PicklingError, RecursionError) as error:
        why = _why_not(value)
        if why is None:
            raise
        raise TypeError(
            f"{name} must be picklable, to be sent to an actor{_culprit(value)}: {why}; got {value!r:.300}"
        ) from error


def check_picklable(name: str, value: object) -> None:
    """Raises if an argument can't be sent to an actor; for what is sent later.

    Raises:
        TypeError: It can't be pickled; the message says which part of it.
    """
    with naming_culprit(name, value):
        _dumps(value)


def _culprit(value: object) -> str:
    """Names the attribute or captured variable at fault, as far down as it can be found."""
    path: list[str] = []
    seen: set[int] = set()
    found = True
    while found and id(value) not in seen:
        seen.add(id(value))
        found = False
        for name, part in _parts(value).items():
            if _why_not(part) is not None:
                path.append(name)
                value, found = part, True
                break
    return f", but {'.'.join(path)} is not" if path else ""


def _parts(value: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    if isinstance(value, dict):
        items = cast("dict[object, object]", value)
        return {repr(key): part for key, part in items.items()}
    function = getattr(value, "__func__", value)
    closure, code = getattr(function, "__closure__", None), getattr(function, "__code__", None)
    if closure and code is not None:
        for name, cell in zip(code.co_freevars, closure, strict=True):
            try:
                parts[name] = cell.cell_contents
            except ValueError:
                continue  # not assigned yet
    if (bound := getattr(value, "__self__", None)) is not None:
        parts["self"] = bound
    if not isinstance(value, type):
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        parts.update(attributes)
        for kind in type(value).__mro__:
            slots: Any = getattr(kind, "__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    parts[name] = getattr(value, name)
    return parts


def _why_not(value: object) -> str | None:
    """Why it can't be pickled; `None` if it can."""
    try:
        _dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _dumps(value: object) -> bytes:
    pickle: Any = cloudpickle
    return bytes(pickle.dumps(value))
