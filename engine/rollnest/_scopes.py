"""Cancel scopes and tasks of the running event loop, without looking for the loop each time."""

from __future__ import annotations

import sys
from asyncio import current_task, get_running_loop
from collections.abc import Callable
from functools import partial

from anyio import CancelScope
from anyio.lowlevel import current_token

__all__ = ["loop_scopes", "loop_tasks"]


def loop_scopes() -> Callable[[], CancelScope]:
    """Returns what makes a cancel scope in the running event loop.

    `CancelScope()` asks which loop runs, and that takes longer than everything else that it does.
    """
    return type(CancelScope())


def loop_tasks() -> Callable[[], object]:
    """Returns what gives the task that runs in the running event loop."""
    if hasattr(current_token().native_token, "time"):
        return partial(current_task, get_running_loop())
    task: Callable[[], object] = sys.modules["trio"].lowlevel.current_task
    return task
