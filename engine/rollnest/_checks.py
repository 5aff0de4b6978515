"""Checks of single arguments: each raises an error that names the argument and shows its value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attrs import Attribute

__all__ = ["check_real", "check_text", "check_whole", "real", "text", "whole"]

Validator = Callable[[Any, "Attribute[Any]", Any], None]


def check_whole(name: str, value: object, minimum: int) -> None:
    """Raises unless `value` is an int (no bool) of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}")


def check_real(
    name: str, value: object, minimum: float, maximum: float = math.inf, *, open_below: bool = False
) -> None:
    """Raises unless `value` is a finite number (no bool) in the given range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    low = value > minimum if open_below else value >= minimum
    if not (math.isfinite(value) and low and value <= maximum):
        lower = f"{'>' if open_below else '>='} {minimum:g}"
        upper = "" if maximum == math.inf else f" and <= {maximum:g}"
        raise ValueError(f"{name} must be finite, {lower}{upper}, got {value!r}")


def check_text(name: str, value: object) -> None:
    """Raises unless `value` is a string with something in it."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    if not value.strip():
        raise ValueError(f"{name} must not be empty, got {value!r}")


def whole(minimum: int, *, optional: bool = False) -> Validator:
    """Returns an attrs validator: an int of at least `minimum`, or `None` if optional."""

    def validate(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not (optional and value is None):
            check_whole(attribute.name, value, minimum)

    return validate


def real(
    minimum: float, maximum: float = math.inf, *, open_below: bool = False, optional: bool = False
) -> Validator:
    """Returns an attrs validator: a finite number in a range, or `None` if optional."""

    def validate(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not (optional and value is None):
            check_real(attribute.name, value, minimum, maximum, open_below=open_below)

    return validate


def text(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """An attrs validator: a string with something in it."""
    check_text(attribute.name, value)
