"""What an actor's call can come back with instead of a value, and whether the call may have run.

Ray tells neither apart by itself: what the actor's code raised comes wrapped, an actor that is gone has several errors,
and a cancelled call's error is no cancellation.
"""

from __future__ import annotations

import re
from typing import Any, cast

from ray.exceptions import (
    ActorDiedError,
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    ActorUnschedulableError,
    OutOfMemoryError,
    PendingCallsLimitExceeded,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    TaskCancelledError,
    WorkerCrashedError,
)

from rollnest.errors import InferenceError, RollnestError

__all__ = ["RayCallFailed", "inference_error", "what_failed"]

_NEVER_BEGAN: tuple[type[RayError], ...] = (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    PendingCallsLimitExceeded,
    RuntimeEnvSetupError,
)
_GONE: tuple[type[RayError], ...] = (
    ActorDiedError,
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    RuntimeEnvSetupError,
)
_MAY_PASS: tuple[type[RayError], ...] = (
    ActorUnavailableError,
    OutOfMemoryError,
    PendingCallsLimitExceeded,
    RayActorError,
    WorkerCrashedError,
)

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class RayCallFailed(RollnestError):
    """An actor's call came back without an answer: the actor is gone or can't be reached, or Ray gave the call up.

    What the actor's own code raised is no such error; it is raised as it is.

    Attributes:
        maybe_executed: Whether the actor may have run the call, in whole or in part.
        actor_gone: Whether the actor is dead for good. Else it may answer the next call: Ray may be restarting it.
        retryable: Whether the failure is one of the actor's process or place, and not of this call.
    """

    def __init__(
        self,
        message: str,
        *,
        maybe_executed: bool = True,
        actor_gone: bool = False,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.maybe_executed = maybe_executed
        self.actor_gone = actor_gone
        self.retryable = retryable


class RemoteTraceback(Exception):  # it is shown as a cause, and never raised
    """Where the actor's code raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def what_failed(error: BaseException) -> BaseException:
    """Returns what is to be raised for an error that Ray gave in a call's place.

    That is the actor's own error if its code raised one, with its traceback as the cause, and else a `RayCallFailed`.
    """
    if isinstance(error, TaskCancelledError):
        return _caused(RayCallFailed("the call was cancelled, and not by its caller"), error)
    if isinstance(error, RayTaskError):
        cause: BaseException = cast("Any", error).cause
        if isinstance(cause, Exception) and not isinstance(cause, RayError):
            cause.__cause__ = RemoteTraceback(_text(error))
            return cause
        return _caused(RayCallFailed(f"the actor's call failed: {_in_a_line(cause)}"), error)
    if isinstance(error, RayError):
        failed = RayCallFailed(
            f"{type(error).__name__}: {_in_a_line(error)}",
            maybe_executed=not isinstance(error, _NEVER_BEGAN) and not _init_failed(error),
            actor_gone=isinstance(error, _GONE),
            retryable=isinstance(error, (*_GONE, *_MAY_PASS)),
        )
        return _caused(failed, error)
    return error


def inference_error(
    error: RayCallFailed, *, what: str, maybe_executed: bool | None = None
) -> InferenceError:
    """Returns the failure as that of the policy's server."""
    failed = InferenceError(
        f"{what}: {error}",
        retryable=error.retryable,
        maybe_executed=error.maybe_executed if maybe_executed is None else maybe_executed,
    )
    failed.__cause__ = error
    return failed


def _caused(error: RayCallFailed, by: BaseException) -> RayCallFailed:
    error.__cause__ = by
    return error


def _init_failed(error: RayError) -> bool:
    return isinstance(error, RayActorError) and error.actor_init_failed


def _in_a_line(error: BaseException) -> str:
    """What Ray says, without its lists of what may be the cause."""
    lines = [line.strip() for line in _text(error).partition("Some common causes")[0].splitlines()]
    return "; ".join(line for line in lines if line)


def _text(error: BaseException) -> str:
    return _COLORS.sub("", str(error))
