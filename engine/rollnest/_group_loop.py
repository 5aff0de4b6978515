"""Runs a loop that generates a whole group: what its live group does, and what the engine does when it has returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from anyio import CancelScope

from ._gate import Gate, OverLimit
from ._group_rules import RuledGroup
from ._members import LOSSES, Members, cancellation_alone, kind_of, side_by_side
from ._records import Failure, Sample, Status
from ._rollout import Rollout, begin_loop, freeze_rollout, must_restart
from ._stray import is_stray
from ._table import RESTARTED
from ._task import TaskSpec
from .errors import HostLost, LoopError, describe

__all__ = ["FailedElsewhere", "OpenGroup", "run_group_loop"]

RESAMPLED = "resampled"
"""Why a member left in whose place the group loop asked for a fresh one."""


class FailedElsewhere(Exception):  # it is caught below, and no error of the user's
    """A group loop failed in another process, of which the error itself has not come."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


async def run_group_loop(members: Members, spec: TaskSpec, gate: Gate) -> None:
    """Runs the group loop, ends what it has not ended, and judges.

    Cancellation: members that have not ended are left as they are.
    """
    if not await members.prepare():
        members.finished = True
        return
    group = OpenGroup(members, spec)
    row, failure, lost = members.row, None, False
    for rollout in members.rollouts.values():
        begin_loop(rollout)  # until it is run, by whom ever
    over = False
    try:
        with gate.limit(spec.limits.group):
            await spec.loop.generate_group(group)
    except OverLimit:
        over = True
    except FailedElsewhere as error:
        failure = error.failure
    except HostLost as error:
        row.losses += error.blamed
        lost = row.losses <= LOSSES
        if not lost:
            said = f"what ran the group loop was lost {row.losses} times; {describe(error)}"
            failure = Failure.of("loop", LoopError(said))
    except Exception as error:
        failure = Failure.of(kind_of(error), error)
    except BaseException as error:
        if is_stray(error):
            failure = Failure("loop", "the group loop cancelled itself")
        elif isinstance(error, BaseExceptionGroup):
            several = cast("BaseExceptionGroup[BaseException]", error)
            raise cancellation_alone(f"the group loop of {group.uid}", several) from None
        else:
            raise
    finally:
        group.shut()
    if any(map(must_restart, members.rollouts.values())):
        # A tool that the group loop itself called did not do the same again. The group waits, and begins anew.
        row.restart = RESTARTED
        members.count_restart()
        return
    if lost:
        return  # it was cut: it waits, and is run again
    if over:
        await group.end_rest(f"the group took over {spec.limits.group} s")
    elif failure is None:
        await group.end_rest()
    else:
        group.fail_rest(failure)
    members.end_generating()
    await members.judge_group()
    members.finished = True


class OpenGroup(RuledGroup):
    """The live group of one row.

    Attributes:
        uid: Its name.
        by_group: Whether its members are judged together.
        seeds: Of members that a replayed loop has yet to come by, by index and place, where they have one of their own.
    """

    def __init__(self, members: Members, spec: TaskSpec) -> None:
        members.begun = set()
        row, lives = members.row, members.lives
        super().__init__(
            row.prompt,
            row.visit,
            members.rollouts,
            members.samples,
            members.begun,
            judges=members.judges,
        )
        self.uid = f"{spec.name}/{row.prompt.uid}/{row.visit}"
        self.by_group = members.by_group
        self.seeds: Mapping[tuple[int, int], int] = {} if lives is None else lives.seeds
        self._members = members
        self._scopes: dict[int, CancelScope] = {}

    async def run(self, rollout: Rollout) -> Sample:
        index = self._begin_run(rollout)
        scope = self._scopes[index] = CancelScope()
        sample: Sample | None = None
        try:
            with scope:
                sample = await self._members.run_member(rollout)
        finally:
            self._running.remove(index)
            del self._scopes[index]
            reason = self._leaving.pop(index, None)
            if reason is not None:
                sample = self._members.leave(index, reason)
        assert sample is not None  # only `drop` cancels the scope
        return sample

    async def judge(self) -> tuple[Sample, ...]:
        self._check_judge()
        await self.end_rest()
        await self._members.judge_group()
        return self.samples

    def resample(self, rollout: Rollout) -> Rollout:
        index = self._begin_resample(rollout)
        fresh = self._members.replace(self._members.ended(index), RESAMPLED)
        begin_loop(fresh)
        return fresh

    def drop(self, rollout: Rollout, reason: str = "dropped") -> None:
        if self._begin_drop(rollout, reason):
            self._scopes[rollout.index].cancel()
        else:
            self._members.leave(rollout.index, reason)

    async def end_rest(self, over: str | None = None) -> None:
        """Ends the members that have not, as if their loop had returned or was over a limit, and judges each."""
        if self.live:
            await side_by_side(self._end, self.live, over)

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
        for rollout in self.live:
            self._members.put(freeze_rollout(rollout, Status.FAILED, failure))
