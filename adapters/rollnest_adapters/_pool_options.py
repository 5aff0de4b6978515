"""Options of a pool, checked."""

from __future__ import annotations

import math
from typing import Any

from attrs import Attribute, field, frozen

__all__ = ["Times", "check_name", "check_whole"]


def check_name(name: object) -> None:
    """Raises unless this may be a server's name."""
    if not isinstance(name, str):
        raise TypeError(f"a server's name must be a string, got {name!r}")
    if not name.strip():
        raise ValueError(f"a server's name must not be empty, got {name!r}")


def check_whole(name: str, value: object, least: int) -> None:
    """Raises unless this is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")


def _seconds(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{attribute.name} must be a number of seconds, got {value!r}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{attribute.name} must be > 0 and finite, got {value!r}")


@frozen(kw_only=True)
class Times:
    """What a pool gives its servers, in seconds; see `ControllerPool`."""

    check_every: float = field(validator=_seconds)
    check_timeout: float = field(validator=_seconds)
    control_timeout: float = field(validator=_seconds)
    abort_timeout: float = field(validator=_seconds)
    update_timeout: float = field(validator=_seconds)
    backoff: float = field(validator=_seconds)
    max_backoff: float = field(validator=_seconds)
