"""Runs a loop that generates a whole group: what its live group does, and what the engine does when it has returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple, cast

from anyio import CancelScope

from ._gate import Gate, OverLimit
from ._live import LiveGroup
from ._members import Members, cancellation_alone, kind_of
from ._records import Failure, Prompt, Sample, Status
from ._rollout import Rollout, begin_loop, freeze_rollout, must_restart
from ._stray import is_stray
from ._table import RESTARTED
from ._task import TaskSpec
from .errors import LoopError

__all__ = ["run_group_loop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

RESAMPLED = "resampled"
"""Why a member left in whose place the group loop asked for a fresh one."""

_RESAMPLES = 16  # in one member's place


async def run_group_loop(members: Members, spec: TaskSpec, gate: Gate) -> None:
    """Runs the group loop, ends what it has not ended, and judges.

    Cancellation: members that have not ended are left as they are.
    """
    if not await members.prepare():
        members.finished = True
        return
    group = _OpenGroup(members)
    row, failure = members.row, None
    for rollout in members.rollouts.values():
        begin_loop(rollout)  # until it is run, by whom ever
    over = False
    try:
        with gate.limit(spec.limits.group):
            await spec.loop.generate_group(group)
    except OverLimit:
        over = True
    except Exception as error:
        failure = Failure.of(kind_of(error), error)
    except BaseException as error:
        if is_stray(error):
            failure = Failure("loop", "the group loop cancelled itself")
        elif isinstance(error, BaseExceptionGroup):
            who = f"the group loop of {spec.name}/{row.prompt.uid}/{row.visit}"
            raise cancellation_alone(
                who, cast("BaseExceptionGroup[BaseException]", error)
            ) from None
        else:
            raise
    finally:
        group.close()
    if any(map(must_restart, members.rollouts.values())):
        # A tool that the group loop itself called did not do the same again. The group waits, and begins anew.
        row.restart = RESTARTED
        members.count_restart()
        return
    if over:
        await group.end_rest(f"the group took over {spec.limits.group} s")
    elif failure is None:
        await group.end_rest()
    else:
        group.fail_rest(failure)
    members.end_generating()
    await members.judge_group()
    members.finished = True


class _OpenGroup(LiveGroup):
    """The live group of one row."""

    def __init__(self, members: Members) -> None:
        members.begun = set()
        self._members = members
        self._begun = members.begun
        self._running: dict[int, CancelScope] = {}
        self._leaving: dict[int, str] = {}  # running members that were dropped, and why
        self._resampled: Counter[int] = Counter()
        self._closed = False

    @property
    def prompt(self) -> Prompt:
        return self._members.row.prompt

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        rollouts = self._members.rollouts
        return tuple(rollouts[index] for index in sorted(rollouts))

    @property
    def samples(self) -> tuple[Sample, ...]:
        samples = self._members.samples
        return tuple(samples[index] for index in sorted(samples))

    async def run(self, rollout: Rollout) -> Sample:
        index = self._index("run()", rollout)
        if index in self._running:
            raise LoopError(f"run() on rollout {rollout.uid}, which runs already")
        self._check_not_ended("run()", rollout)
        if index in self._begun:
            raise LoopError(f"run() on rollout {rollout.uid}, which was run and cancelled")
        self._begun.add(index)
        scope = self._running[index] = CancelScope()
        sample: Sample | None = None
        try:
            with scope:
                sample = await self._members.run_member(rollout)
        finally:
            del self._running[index]
            reason = self._leaving.pop(index, None)
            if reason is not None:
                sample = self._members.leave(index, reason)
        assert sample is not None  # only `drop` cancels the scope
        return sample

    async def each(self, function: Callable[[Rollout, *Ts], Awaitable[T]], *args: *Ts) -> list[T]:
        self._check_open("each()")
        live = [r for r in self.rollouts if r.index not in self._members.samples]
        return await self._members.each(function, live, *args)

    async def judge(self) -> tuple[Sample, ...]:
        self._check_open("judge()")
        if not self._members.judges:
            raise LoopError("judge() on a task without a judger")
        for index in self._running:
            uid = self._members.rollouts[index].uid
            raise LoopError(f"judge() while rollout {uid} runs")
        await self.end_rest()
        await self._members.judge_group()
        return self.samples

    def resample(self, rollout: Rollout) -> Rollout:
        index = self._index("resample()", rollout)
        if index in self._running or rollout.busy:
            raise LoopError(f"resample() on rollout {rollout.uid}, which runs")
        if self._resampled[index] >= _RESAMPLES:
            raise LoopError(
                f"rollout {rollout.uid} was resampled {_RESAMPLES} times; that is the most"
            )
        self._resampled[index] += 1
        self._begun.discard(index)
        fresh = self._members.replace(self._members.ended(index), RESAMPLED)
        begin_loop(fresh)
        return fresh

    def drop(self, rollout: Rollout, reason: str = "dropped") -> None:
        index = self._index("drop()", rollout)
        if not isinstance(reason, str) or not reason:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LoopError(f"drop() needs a reason, a string, got {reason!r}")
        if self._members.count - len(self._leaving) <= 1:
            raise LoopError(f"drop() on rollout {rollout.uid}, the last member of its group")
        if index in self._running:
            self._leaving[index] = reason
            self._running[index].cancel()
        elif rollout.busy:
            raise LoopError(f"drop() on rollout {rollout.uid}, of which a turn runs outside run()")
        else:
            self._members.leave(index, reason)

    def close(self) -> None:
        """The group loop has returned."""
        self._closed = True

    async def end_rest(self, over: str | None = None) -> None:
        """Ends the members that have not, as if their loop had returned or was over a limit, and judges each."""
        live = [r for r in self.rollouts if r.index not in self._members.samples]
        if live:
            await self._members.each(self._end, live, over)

    async def _end(self, rollout: Rollout, over: str | None) -> None:
        index = rollout.index
        sample = self._members.unjudged.get(index)  # run() was cancelled while it was judged
        if sample is None and over is not None:
            sample = self._members.over_limit(rollout, over)
        elif sample is None and index in self._begun:
            lost = Failure("loop", "the group loop cancelled its run()")
            sample = freeze_rollout(rollout, Status.FAILED, lost)
        elif sample is None and not rollout.turns:
            lost = Failure("loop", "the group loop returned and had it generate nothing")
            sample = freeze_rollout(rollout, Status.FAILED, lost)
        elif sample is None:
            sample = self._members.as_it_was(freeze_rollout(rollout, Status.COMPLETED))
        self._begun.add(index)
        if sample.status is not Status.COMPLETED:
            self._members.put(sample)
            return
        try:
            await self._members.judge(sample)
        except BaseExceptionGroup as group:
            raise cancellation_alone(rollout.uid, group) from None

    def fail_rest(self, failure: Failure) -> None:
        """Ends the members that have not: the group loop failed."""
        for rollout in self.rollouts:
            if rollout.index not in self._members.samples:
                self._members.put(freeze_rollout(rollout, Status.FAILED, failure))

    def _index(self, what: str, rollout: Rollout) -> int:
        self._check_open(what)
        if (
            self._members.rollouts.get(rollout.index) is not rollout
            or rollout.index in self._leaving
        ):
            raise LoopError(f"{what} on rollout {rollout.uid}, which is no member of {self!r}")
        return rollout.index

    def _check_not_ended(self, what: str, rollout: Rollout) -> None:
        sample = self._members.samples.get(rollout.index)
        if sample is not None:
            raise LoopError(
                f"{what} on rollout {rollout.uid}, which has ended: {sample.status.value}"
            )

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise LoopError(f"{what} on {self!r}, whose loop has returned")

    def __repr__(self) -> str:
        row = self._members.row
        return f"<LiveGroup of prompt {row.prompt.uid!r} visit {row.visit}: {self._members.count} members>"
