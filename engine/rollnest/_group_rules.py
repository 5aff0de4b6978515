"""What a group loop may do with which member, wherever it runs. What becomes of the member is a subclass's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar, TypeVarTuple

from ._live import LiveGroup
from ._members import side_by_side
from ._records import Prompt, Sample
from ._rollout import Rollout
from .errors import LoopError

__all__ = ["RuledGroup"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_RESAMPLES = 16  # in one member's place


class RuledGroup(LiveGroup):
    """A live group that refuses what a loop may not do. Synchronous: a check and what it allows are one step.

    Attributes:
        judges: Whether the task has a judger.

    Args:
        prompt: What is asked.
        visit: Which visit of the prompt.
        rollouts: The members, by index; changed by the subclass.
        ended: Samples of those that have ended, by index; changed by the subclass.
        begun: Indexes of members that were run, changed here.
        judges: Whether the task has a judger.
    """

    def __init__(
        self,
        prompt: Prompt,
        visit: int,
        rollouts: Mapping[int, Rollout],
        ended: Mapping[int, Sample],
        begun: set[int],
        *,
        judges: bool,
    ) -> None:
        self._prompt = prompt
        self._visit = visit
        self._rollouts = rollouts
        self._ended = ended
        self._begun = begun
        self.judges = judges
        self._running: set[int] = set()
        self._leaving: dict[int, str] = {}  # running members that were dropped, and why
        self._resampled: Counter[int] = Counter()
        self._closed = False

    @property
    def prompt(self) -> Prompt:
        return self._prompt

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(self._rollouts[index] for index in sorted(self._rollouts))

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(self._ended[index] for index in sorted(self._ended))

    async def each(self, function: Callable[[Rollout, *Ts], Awaitable[T]], *args: *Ts) -> list[T]:
        self._check_open("each()")
        return await side_by_side(function, self.live, *args)

    @property
    def live(self) -> list[Rollout]:
        """Those that have not ended, by index."""
        return [rollout for rollout in self.rollouts if rollout.index not in self._ended]

    def shut(self) -> None:
        """The group loop has returned."""
        self._closed = True

    # What is allowed

    def _begin_run(self, rollout: Rollout) -> int:
        """A member is to be run; returns its index."""
        index = self._index("run()", rollout)
        if index in self._running:
            raise LoopError(f"run() on rollout {rollout.uid}, which runs already")
        sample = self._ended.get(index)
        if sample is not None:
            raise LoopError(
                f"run() on rollout {rollout.uid}, which has ended: {sample.status.value}"
            )
        if index in self._begun:
            raise LoopError(f"run() on rollout {rollout.uid}, which was run and cancelled")
        self._begun.add(index)
        self._running.add(index)
        return index

    def _check_judge(self) -> None:
        self._check_open("judge()")
        if not self.judges:
            raise LoopError("judge() on a task without a judger")
        for index in self._running:
            raise LoopError(f"judge() while rollout {self._rollouts[index].uid} runs")

    def _begin_resample(self, rollout: Rollout) -> int:
        """A fresh member is to take one's place; returns its index."""
        index = self._index("resample()", rollout)
        if index in self._running or rollout.busy:
            raise LoopError(f"resample() on rollout {rollout.uid}, which runs")
        if self._resampled[index] >= _RESAMPLES:
            raise LoopError(
                f"rollout {rollout.uid} was resampled {_RESAMPLES} times; that is the most"
            )
        self._resampled[index] += 1
        self._begun.discard(index)
        return index

    def _begin_drop(self, rollout: Rollout, reason: str) -> bool:
        """A member is to leave; returns whether it runs, and so leaves when its run has ended."""
        index = self._index("drop()", rollout)
        if not isinstance(reason, str) or not reason:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LoopError(f"drop() needs a reason, a string, got {reason!r}")
        if len(self._rollouts) - len(self._leaving) <= 1:
            raise LoopError(f"drop() on rollout {rollout.uid}, the last member of its group")
        if index in self._running:
            self._leaving[index] = reason
            return True
        if rollout.busy:
            raise LoopError(f"drop() on rollout {rollout.uid}, of which a turn runs outside run()")
        return False

    def _index(self, what: str, rollout: Rollout) -> int:
        self._check_open(what)
        if self._rollouts.get(rollout.index) is not rollout or rollout.index in self._leaving:
            raise LoopError(f"{what} on rollout {rollout.uid}, which is no member of {self!r}")
        return rollout.index

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise LoopError(f"{what} on {self!r}, whose loop has returned")

    def __repr__(self) -> str:
        count = len(self._rollouts)
        return f"<LiveGroup of prompt {self._prompt.uid!r} visit {self._visit}: {count} members>"
