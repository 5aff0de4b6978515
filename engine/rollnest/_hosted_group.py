"""The live group that a group loop holds whose engine is elsewhere.

What the loop may do is checked here, by the engine's own rules, and what it decides at once is told to the engine at
once. The engine's group stays the truth: members end there, are judged there and leave there. The loop of a member runs
here, in the task that called `run`, each time that the engine says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, cast

from anyio import CancelScope
from attrs import evolve

from ._context import RolloutServices
from ._group_rules import RuledGroup
from ._host_messages import (
    Begin,
    BeginGroup,
    Did,
    Dropped,
    Edit,
    End,
    Ended,
    Enter,
    FromHost,
    GroupAnswer,
    JudgeGroup,
    Member,
    Resampled,
    RunLoop,
    RunMember,
    ToHost,
)
from ._host_requests import Requests, Waiting
from ._hosted_rollout import HostedRollout
from ._loops import AgentLoop
from ._members import cancellation_alone, kind_of
from ._records import Failure, Sample
from ._rollout import Rollout, begin_loop
from ._stray import is_stray
from .errors import HostLost

__all__ = ["HostedGroup", "loop_failure"]


class HostedGroup(RuledGroup):
    """The rollouts of one visit of a prompt, whose engine is elsewhere.

    Attributes:
        session: Its number.
        uid: Its name.
        scope: Around its loop.

    Args:
        services: What its rollouts use.
        begin: What the engine says of it.
        loop: The loop.
        send: Takes what is for the engine.
        sessions: What runs on the host, by number: members are in it while the group is.
        fresh: Gives numbers for members that are begun here.
    """

    def __init__(
        self,
        services: RolloutServices,
        begin: BeginGroup,
        loop: AgentLoop,
        send: Callable[[FromHost], None],
        sessions: MutableMapping[int, Any],
        *,
        fresh: Callable[[], int],
    ) -> None:
        self._members: dict[int, HostedRollout] = {}
        self._made: dict[int, Sample] = {}
        super().__init__(
            begin.prompt, begin.visit, self._members, self._made, set(), judges=begin.judges
        )
        self.session = begin.session
        self.uid = f"{services.task}/{begin.prompt.uid}/{begin.visit}"
        self.scope = CancelScope()
        self._requests = Requests(begin.session, send)
        self._services = services
        self._given = begin
        self._loop = loop
        self._send = send
        self._sessions = sessions
        self._fresh = fresh
        for member in begin.members:
            self._enter(member)

    @property
    def requests(self) -> int:
        """What the group loop has asked for and not got yet, its members aside."""
        return len(self._requests.waiting)

    def begin(self) -> None:
        """The running task is the one that runs its loop."""
        for rollout in self._members.values():
            begin_loop(rollout)

    def close(self) -> Sequence[Edit]:
        """Its loop has ended: its members are the engine's from now on."""
        self.shut()
        self._tell_edits()
        for rollout in self._members.values():
            rollout.close()
            self._sessions.pop(rollout.session, None)
        return ()

    # From the engine

    def receive(self, message: ToHost) -> None:
        """Takes a message of the engine's; synchronous."""
        match message:
            case Enter(member=member):
                self._sessions.pop(self._members[member.index].session, None)
                self._enter(member)
            case RunLoop():
                self._requests.want(message.number, message.member)
            case GroupAnswer():
                self._take_in(message)
                self._requests.take(message)
            case End():
                self._requests.ending = True
                self.scope.cancel()
                for rollout in self._members.values():
                    rollout.end()
            case _:  # of a rollout's session only
                pass

    def _enter(self, member: Member) -> HostedRollout:
        whole = self._given
        begin = Begin(
            member.session,
            whole.setup,
            whole.prompt,
            whole.prompt_ids,
            whole.visit,
            member.index,
            member.place,
            member.seed,
            whole.judges_groups,
        )
        rollout = HostedRollout(self._services, begin, self._loop.tools, self._send)
        self._members[member.index] = self._sessions[member.session] = rollout
        if self._requests.ending:
            rollout.end()
        return rollout

    def _take_in(self, answer: GroupAnswer) -> None:
        for session, sample in answer.ended:
            rollout = self._members.get(sample.index)
            if rollout is not None and rollout.session == session:
                rollout.ended(sample)
                self._made[sample.index] = self._whole(sample)

    def _whole(self, sample: Sample) -> Sample:
        return evolve(sample, prompt=self._prompt)

    # What a group loop does

    async def run(self, rollout: Rollout) -> Sample:
        index = self._begin_run(rollout)
        self._tell_edits()
        try:
            request = RunMember(self._members[index].session)
            answer, _ = await self._requests.ask(request, self._run_here)
        finally:
            self._running.remove(index)
            if self._leaving.pop(index, None) is not None:
                self._forget(index)
        sample = self._made.get(index)
        return self._whole(answer.sample) if sample is None else sample

    async def _run_here(self, _: Waiting, session: int) -> None:
        """Runs a member's loop, and says how it has ended, unless it was cancelled here: then the request is."""
        rollout: HostedRollout = self._sessions[session]
        failure: Failure | HostLost | None = None
        has_ended = False

        async def run() -> None:
            begin_loop(rollout)
            await self._loop.generate_sample(rollout)

        try:
            with rollout.scope:
                failure = await loop_failure(run, rollout.uid, "agent")
            has_ended = True
        finally:
            if has_ended:
                self._send(Ended(session, rollout.close(), failure))
            else:
                self._tell_edits()

    async def judge(self) -> tuple[Sample, ...]:
        self._check_judge()
        self._tell_edits()
        await self._requests.ask(JudgeGroup())
        return self.samples

    def resample(self, rollout: Rollout) -> Rollout:
        index = self._begin_resample(rollout)
        self._tell_edits()
        left = self._forget(index)
        place = left.place + 1
        seed = self._given.seeds.get((index, place), self._given.seed)
        fresh = self._enter(Member(self._fresh(), index, place, seed))
        begin_loop(fresh)
        self._send(Resampled(self.session, left.session, fresh.session))
        return fresh

    def drop(self, rollout: Rollout, reason: str = "dropped") -> None:
        runs = self._begin_drop(rollout, reason)
        self._tell_edits()
        self._send(Dropped(self.session, rollout.index, reason))
        if not runs:
            self._forget(rollout.index)

    def _forget(self, index: int) -> HostedRollout:
        rollout = self._members.pop(index)
        self._made.pop(index, None)
        rollout.close()
        self._sessions.pop(rollout.session, None)
        return rollout

    def _tell_edits(self) -> None:
        """Tells the engine what members were given, before something of the group depends on it."""
        for rollout in self._members.values():
            edits = rollout.take_edits()
            if edits:
                self._send(Did(rollout.session, edits))


async def loop_failure(
    run: Callable[[], Awaitable[None]], who: str, kind: str
) -> Failure | HostLost | None:
    """Runs a loop; returns why it failed, or is to be run again, and `None` if neither.

    Args:
        run: Runs it.
        who: Whose it is.
        kind: Which kind of loop, for messages.

    Cancellation: passes, alone.
    """
    try:
        await run()
    except HostLost as lost:
        return lost
    except Exception as error:
        return Failure.of(kind_of(error), error)
    except BaseException as error:
        if is_stray(error):
            return Failure("loop", f"the {kind} loop cancelled itself")
        if isinstance(error, BaseExceptionGroup):
            several = cast("BaseExceptionGroup[BaseException]", error)
            raise cancellation_alone(who, several) from None
        raise
    return None
