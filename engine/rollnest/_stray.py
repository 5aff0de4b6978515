"""Cancellations that nobody asked for: raised by hand, or by a task of the user's own that was awaited.

They are errors of the code that they come from. Let through, they would end the tasks around it, one after the other,
up to the producer, and nobody would hear of it.
"""

from __future__ import annotations

import asyncio
import math

from anyio import current_effective_deadline, get_cancelled_exc_class

from .errors import leaves

__all__ = ["is_cancelled", "is_stray"]


def is_cancelled() -> bool:
    """Whether a scope around the caller is cancelled, and no shield is between them."""
    return current_effective_deadline() == -math.inf


def is_stray(error: BaseException, *, in_loop: bool = False) -> bool:
    """Whether what came out of a user's code is a cancellation, though nobody asked for it.

    Ask at once where it arrives. An exit (`KeyboardInterrupt`, `SystemExit`) that came along makes it none.

    Args:
        error: What came out.
        in_loop: Whether the user's loop stands around the call. It may have cancelled it in asyncio's own way, by
            `asyncio.timeout` for one, and takes that back itself. Around the loop there is nobody who would.
    """
    if isinstance(error, Exception) or is_cancelled():
        return False
    if in_loop and _is_natively_cancelled():
        return False
    mine = (Exception, get_cancelled_exc_class())
    return all(isinstance(leaf, mine) for leaf in leaves(error))


def _is_natively_cancelled() -> bool:
    """Whether asyncio cancels the task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # another event loop
        return False
    return task is not None and task.cancelling() > 0
