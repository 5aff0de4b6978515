"""The live group: what a group loop works with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

from ._records import Prompt, Sample
from ._rollout import Rollout

__all__ = ["LiveGroup"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LiveGroup(ABC):
    """The rollouts of one visit of a prompt, while they run.

    Made by the engine; `AgentLoop.generate_group` gets it, has the rollouts generate, and returns. A rollout ends when
    it was run, judged or let go; those that have not ended are ended as if their loop had returned, and judged.
    Afterwards every method raises `LoopError`.
    """

    @property
    @abstractmethod
    def prompt(self) -> Prompt:
        """What is asked."""

    @property
    @abstractmethod
    def rollouts(self) -> tuple[Rollout, ...]:
        """The members' rollouts, by index; those that have ended too."""

    @property
    @abstractmethod
    def samples(self) -> tuple[Sample, ...]:
        """The samples of the members that have ended, by index."""

    @abstractmethod
    async def run(self, rollout: Rollout) -> Sample:
        """Runs the loop's `generate_sample` for one rollout, under the task's limits, and then its judger.

        A failure stays in the sample. If the task's `FailurePolicy` retries, a fresh rollout takes its place here; what
        is returned is how the last of them ended.

        Returns:
            The sample: judged, or failed; unjudged if the judger judges whole groups; aborted if `drop` ended it.

        Raises:
            LoopError: It is no member (any more), runs already, has run or ended; or the group has.

        Cancellation: what it received is kept in the rollout, which can't be run again. Unless it is dropped or
        resampled, or the engine itself was cancelled, it counts as failed.
        """

    @abstractmethod
    async def each(self, function: Callable[[Rollout, *Ts], Awaitable[T]], *args: *Ts) -> list[T]:
        """Calls an async function for every rollout that has not ended, side by side, and waits for all.

            await group.each(group.run)

        Args:
            function: Called with the rollout and `args`. One that raises cancels the others.
            args: Its further arguments.

        Returns:
            What it returned, by index.

        Raises:
            ExceptionGroup: What the function raised, as a task group raises it.
            LoopError: The group has ended.

        Cancellation: cancels all of them.
        """

    @abstractmethod
    async def judge(self) -> tuple[Sample, ...]:
        """Ends every rollout that has not ended, and judges every sample that is not judged.

        A judger of whole groups is asked if every member completed; again, if members were resampled since.

        Returns:
            All samples, by index; those for which there is no verdict are failed.

        Raises:
            LoopError: A rollout runs, the task has no judger, or the group has ended.

        Cancellation: as for a judger after the loop; nothing is recorded.
        """

    @abstractmethod
    def resample(self, rollout: Rollout) -> Rollout:
        """Lets a member go and returns a fresh rollout in its place, with its index and seeds of its own.

        What was let go is counted as `"resampled"`; its verdict is forgotten.

        Raises:
            LoopError: It is no member, or runs; its place was resampled 16 times; or the group has ended.
        """

    @abstractmethod
    def drop(self, rollout: Rollout, reason: str = "dropped") -> None:
        """Lets a member go: the group is smaller by one. A running one is cancelled.

        Args:
            rollout: The member.
            reason: What it is counted as; statistics keep few different reasons.

        Raises:
            LoopError: It is no member, it is the last one, or a turn of it runs outside `run`; or the group has ended.
        """
