"""Cancellations that nobody asked for: raised by hand, or by a task of the user's own that was awaited.

They are errors of the code that they come from. Let through, they would end the tasks around it, one after the other,
up to the producer, and nobody would hear of it.
"""

from __future__ import annotations

import math

from anyio import current_effective_deadline, get_cancelled_exc_class

from .errors import leaves

__all__ = ["is_cancelled", "is_stray"]


def is_cancelled() -> bool:
    """Whether a scope around the caller is cancelled, and no shield is between them."""
    return current_effective_deadline() == -math.inf


def is_stray(error: BaseException) -> bool:
    """Whether what came out of a user's code is a cancellation, though no scope of ours is cancelled.

    Ask at once where it arrives. An exit (`KeyboardInterrupt`, `SystemExit`) that came along makes it none.
    """
    if isinstance(error, Exception) or is_cancelled():
        return False
    mine = (Exception, get_cancelled_exc_class())
    return all(isinstance(leaf, mine) for leaf in leaves(error))
