"""Marks methods of actors with their concurrency group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ._bridge import RAY

__all__ = ["in_group"]

T = TypeVar("T")


def in_group(name: str) -> Callable[[T], T]:
    """`ray.method(concurrency_group=name)`, which keeps the method's type."""
    return lambda function: RAY.method(concurrency_group=name)(function)
