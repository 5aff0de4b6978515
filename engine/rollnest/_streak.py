"""Counts failures that nothing good came between, so that an engine in which everything fails stops and says why."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from ._records import Failure, FailureKind
from .errors import DataError, InferenceError, JudgeError, LoopError, RollnestError, ToolError

__all__ = ["FailureStreak"]

_SHOWN = 3  # failures that the error carries: the last ones

_ERRORS: dict[FailureKind, type[RollnestError]] = {
    "inference": InferenceError,
    "tool": ToolError,
    "judge": JudgeError,
    "data": DataError,
}


class FailureStreak:
    """The failures of one task since a sample last completed.

    Args:
        task: The task's name.
        limit: How many are too many; `None` is never.
        on_full: Told once there are: what happened, and the last failures as errors.
    """

    def __init__(
        self, task: str, limit: int | None, on_full: Callable[[str, BaseException], None]
    ) -> None:
        self._task = task
        self._limit = limit
        self._on_full = on_full
        self._kinds: Counter[FailureKind] = Counter()
        self._last: deque[tuple[str, Failure]] = deque(maxlen=_SHOWN)

    def completed(self) -> None:
        """A sample completed."""
        if self._kinds:
            self._kinds.clear()
            self._last.clear()

    def failed(self, uid: str, failure: Failure) -> None:
        """A sample failed."""
        self._kinds[failure.kind] += 1
        self._last.append((uid, failure))
        count = self._kinds.total()
        if count == self._limit:
            kinds = ", ".join(f"{n} {kind}" for kind, n in self._kinds.most_common())
            errors = [
                _ERRORS.get(failure.kind, LoopError)(f"sample {uid}: {failure.message}")
                for uid, failure in self._last
            ]
            self._on_full(
                f"task {self._task!r} had {count} failures in a row ({kinds}), and no sample that completed",
                ExceptionGroup("the last failures", errors),
            )

    def __repr__(self) -> str:
        return f"<FailureStreak of {self._task!r}: {dict(self._kinds)}>"
