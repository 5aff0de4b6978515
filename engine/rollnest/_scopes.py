"""Cancel scopes of the running event loop, made without looking for the loop each time."""

from __future__ import annotations

from collections.abc import Callable

from anyio import CancelScope

__all__ = ["loop_scopes"]


def loop_scopes() -> Callable[[], CancelScope]:
    """Returns what makes a cancel scope in the running event loop.

    `CancelScope()` asks which loop runs, and that takes longer than everything else that it does.
    """
    return type(CancelScope())
