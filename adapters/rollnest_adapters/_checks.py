"""Checks of single arguments: each raises an error that names the argument and shows its value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attrs import Attribute

__all__ = ["check_positive", "check_text", "check_whole", "positive", "whole"]

Validator = Callable[[Any, "Attribute[Any]", Any], None]


def check_text(name: str, value: object) -> None:
    """Raises unless this is a string with something in it."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    if not value.strip():
        raise ValueError(f"{name} must not be empty, got {value!r}")


def check_whole(name: str, value: object, least: int) -> None:
    """Raises unless this is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")


def check_positive(name: str, value: object, most: float = math.inf) -> None:
    """Raises unless this is a finite number above 0, and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (0 < value <= most and math.isfinite(value)):
        bound = "finite" if most == math.inf else f"<= {most:g}"
        raise ValueError(f"{name} must be > 0 and {bound}, got {value!r}")


def whole(least: int) -> Validator:
    """Returns an attrs validator: an int of at least `least`."""
    return lambda _, attribute, value: check_whole(attribute.name, value, least)


def positive(most: float = math.inf) -> Validator:
    """Returns an attrs validator: a finite number above 0, and at most `most`."""
    return lambda _, attribute, value: check_positive(attribute.name, value, most)
