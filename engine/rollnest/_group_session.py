"""One run of a group loop on a host, as the engine sees it.

The engine's group is the truth. What the loop asks for is done on it, as if the loop ran here; each member has a
session of its own for what is asked of its rollout. When the engine runs a member, the host runs the member's loop, in
the task that asked for it, and the engine serves it as any other.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from anyio import CancelScope, Event, create_task_group, current_time, sleep_forever
from anyio.abc import TaskGroup
from attrs import evolve

from ._group_loop import FailedElsewhere, OpenGroup
from ._host_messages import (
    Answer,
    Ask,
    BeginGroup,
    Dropped,
    Edit,
    End,
    Ended,
    Enter,
    FromHost,
    GroupAnswer,
    JudgeGroup,
    Member,
    Prepare,
    Request,
    Resampled,
    RunLoop,
    RunMember,
    Withdraw,
)
from ._records import Failure, Prompt, Sample
from ._rollout import Rollout
from ._sessions import Ending, Host, Session, bare, core_of, place_of, prompt_ids_of
from .errors import HostLost, LoopError, RollnestError, describe

__all__ = ["GroupSession", "member_run"]

_NO_PROMPT = Prompt("-", token_ids=[0])
"""In the place of a sample's prompt, on its way to a host that has it."""

_run: ContextVar[Callable[[Rollout], Awaitable[None]]] = ContextVar("rollnest_member_run")


def member_run() -> Callable[[Rollout], Awaitable[None]] | None:
    """What runs the loop of a rollout on the host of its group; `None` if it has none."""
    return _run.get(None)


class GroupSession:
    """One run of a group loop, on one host.

    Attributes:
        number: Its own on the host.
        uid: The group's name.
        group: The engine's group.
        host: Where the loop runs.
        over: Whether nothing more will come of it: the loop has ended there, or the host is lost.
        cut_at: When the loop was told to end.
        is_suspect: Whether it may bring its host down.
        is_blamed: Whether it may have.
        closing: Whether nothing is served any more.

    Args:
        rests: Whether what was asked for comes to its end when the host is lost, because it is given again.
        numbers: Gives numbers for sessions.
        cut: Ends a loop on its host.
    """

    def __init__(
        self,
        number: int,
        group: OpenGroup,
        host: Host,
        *,
        is_suspect: bool,
        rests: bool,
        numbers: Callable[[], int],
        cut: Callable[[Ending], Awaitable[None]],
    ) -> None:
        self.number = number
        self.uid = group.uid
        self.group = group
        self.host = host
        self.over = False
        self.cut_at: float | None = None
        self.is_suspect = is_suspect
        self.is_blamed = False
        self.closing = False
        self.cut = cut
        self._rests = rests
        self._numbers = numbers
        self._lost: str | None = None
        self._failure: Failure | HostLost | None = None
        self._over = Event()
        self._members: dict[int, _MemberSession] = {}  # by index
        self._told: dict[int, Sample] = {}  # what the host knows
        self._serving: dict[int, CancelScope] = {}
        self._runs: dict[int, _MemberSession] = {}  # by request
        self._tasks: TaskGroup
        self._at_work = 0
        self._idle = Event()

    async def serve(self, prepare: Prepare) -> None:
        """Has the group loop run, and does what it asks for, until it has ended or is lost.

        Cancellation: the loop is told to end.
        """
        self.host.sessions[self.number] = self
        unsent: Exception | None = None
        async with create_task_group() as tasks:
            self._tasks = tasks
            begin = self._begin(prepare)
            try:
                self.host.send(begin)
            except Exception as error:  # raised outside, where it is not in a group
                unsent = error
                self._end()
            try:
                await self._over.wait()
                while self._lost is not None and self._rests and self._at_work:
                    self._idle = Event()
                    await self._idle.wait()
            finally:
                self.closing = True
                if not self.over:
                    self.cut_at = current_time()
                    self.host.send(End(self.number))
            tasks.cancel_scope.cancel()
        if unsent is not None:
            raise unsent

    def _begin(self, prepare: Prepare) -> BeginGroup:
        group = self.group
        first, *_ = group.rollouts
        members = [self._enter(rollout, self._numbers()) for rollout in group.rollouts]
        return BeginGroup(
            self.number,
            prepare.setup,
            group.prompt,
            array("i", prompt_ids_of(first)),
            place_of(first)["visit"],
            [member.described for member in members],
            core_of(first).services.seed,
            group.seeds,
            group.judges,
            group.by_group,
        )

    def conclude(self) -> None:
        """Says how the loop has ended."""
        if self._lost is not None:
            raise HostLost(self._lost, blamed=self.is_blamed)
        if isinstance(self._failure, HostLost):
            raise self._failure
        if self._failure is not None:
            raise FailedElsewhere(self._failure)

    async def until_over(self) -> None:
        """Waits until nothing more will come of it."""
        await self._over.wait()

    def forget(self) -> None:
        """What the host still says of it is dropped."""
        for number in (self.number, *(member.number for member in self._members.values())):
            self.host.sessions.pop(number, None)

    # From the host

    def receive(self, message: FromHost) -> None:
        """Takes a message of the host's; synchronous."""
        if self.over:
            return
        match message:
            case Ask() if not self.closing:
                scope = self._serving[message.number] = CancelScope()
                name = f"{self.uid} of a host"
                self._tasks.start_soon(self._serve, message, scope, name=name)
            case Withdraw(number=number):
                if number in self._runs:
                    self._runs[number].end_run()  # it has ended there
                if number in self._serving:
                    self._serving[number].cancel()
            case Resampled() | Dropped():
                try:
                    self._let_go(message)
                except Exception as error:
                    self.refuse(error)
            case Ended():
                self._failure = self._failure or message.failure
                self._end()
            case _:
                pass

    def lose(self, why: str, *, blamed: bool) -> None:
        """The host is gone; its members' sessions hear of it too."""
        if not self.over:
            self._lost, self.is_blamed = why, blamed
            self._end()

    def refuse(self, error: Exception) -> None:
        """The loop has done what is not possible: it fails."""
        self._failure = Failure.of("loop", error)
        self.host.send(End(self.number))

    def _end(self) -> None:
        self.over = True
        self._over.set()
        if self._lost is None:
            for member in self._members.values():
                member.leave()

    def _let_go(self, message: Resampled | Dropped) -> None:
        if isinstance(message, Dropped):
            self.group.drop(self._at(message.index).rollout, message.reason)
            return
        if message.fresh >= 0 or message.fresh in self.host.sessions:
            raise LoopError(f"{self.host.name} gives a fresh member the session {message.fresh}")
        self._enter(self.group.resample(self._member(message.member).rollout), message.fresh)

    # Members

    def _enter(self, rollout: Rollout, number: int) -> _MemberSession:
        """A rollout is a member from now on, in the place of the one before it."""
        before = self._members.get(rollout.index)
        if before is not None:
            before.leave()
            before.forget()
        member = _MemberSession(number, rollout, self, self._tasks)
        self._members[rollout.index] = self.host.sessions[number] = member
        return member

    def _at(self, index: int) -> _MemberSession:
        member = self._members.get(index)
        if member is None:
            raise LoopError(f"{self.host.name} names member {index} of {self.uid}")
        return member

    def _member(self, number: int) -> _MemberSession:
        for member in self._members.values():
            if member.number == number:
                return member
        raise LoopError(
            f"{self.host.name} names session {number}, which is no member of {self.uid}"
        )

    async def run_member(self, number: int, rollout: Rollout) -> None:
        """Has the loop of a member run on the host, for a request of the group loop's."""
        if not self.over:
            member = self._members.get(rollout.index)
            if member is None or member.rollout is not rollout:  # another one is tried
                member = self._enter(rollout, self._numbers())
                self.host.send(Enter(self.number, member.described))
            self._runs[number] = member
            try:
                await member.run(number)
            finally:
                del self._runs[number]
            if member.has_ended:
                member.conclude()
                return
        # It was cancelled there, or its host is lost: it has no end, and is about to be cancelled here.
        self._rest(-1)
        try:
            await sleep_forever()
        finally:
            self._rest(1)

    # What it asks for

    async def _serve(self, ask: Ask, scope: CancelScope) -> None:
        """Does what the group loop asks for. A withdrawn request has an answer too: who has ended meanwhile."""
        error: RollnestError | None = None
        sample: Sample | None = None
        _run.set(partial(self.run_member, ask.number))
        with self.working():
            try:
                with scope:
                    sample = await self._do(ask.request)
            except RollnestError as raised:
                error = bare(raised)
            except Exception as raised:
                error = LoopError(describe(raised))
            finally:
                del self._serving[ask.number]
        if not self.over:
            self.host.send(self._answer(ask.number, error, sample))

    async def _do(self, request: Request) -> Sample | None:
        match request:
            case RunMember(member=number):
                return await self.group.run(self._member(number).rollout)
            case JudgeGroup():
                await self.group.judge()
                return None
            case _:
                raise LoopError(f"{self.host.name} asks the group {self.uid} for {request!r}")

    def _answer(
        self, number: int, error: RollnestError | None, sample: Sample | None
    ) -> GroupAnswer:
        news = [ended for ended in self.group.samples if self._told.get(ended.index) is not ended]
        self._told |= {ended.index: ended for ended in news}
        bared = {id(ended): evolve(ended, prompt=_NO_PROMPT) for ended in news}
        if sample is not None and id(sample) not in bared:
            bared[id(sample)] = evolve(sample, prompt=_NO_PROMPT)
        return GroupAnswer(
            self.number,
            number,
            error,
            None if sample is None else bared[id(sample)],
            [(self._members[ended.index].number, bared[id(ended)]) for ended in news],
        )

    @contextmanager
    def working(self) -> Generator[None]:
        """Something is done in the block that should come to its end if the host is lost."""
        self._rest(1)
        try:
            yield
        finally:
            self._rest(-1)

    def _rest(self, by: int) -> None:
        self._at_work += by
        self._idle.set()

    def __repr__(self) -> str:
        return f"<GroupSession of {self.uid} on {self.host.name}>"


class _MemberRun:
    """One run of a member's loop on a host."""

    def __init__(self, member: _MemberSession) -> None:
        self.number = member.number
        self.uid = member.uid
        self.host = member.host
        self.over = False
        self.cut_at: float | None = None
        self._over = Event()

    def end(self) -> None:
        """Nothing more will come of it."""
        self.over = True
        self._over.set()

    async def until_over(self) -> None:
        """Waits until nothing more will come of it."""
        await self._over.wait()


class _MemberSession(Session):
    """What a group loop, and the loop of a member while it is run, ask the member's rollout for.

    Attributes:
        has_ended: Whether the member's loop was run, and has come to its end.
    """

    def __init__(
        self, number: int, rollout: Rollout, group: GroupSession, tasks: TaskGroup
    ) -> None:
        super().__init__(number, rollout, group.host)
        self.has_ended = False
        self._group = group
        self._tasks = tasks
        self._run: _MemberRun | None = None

    @property
    def described(self) -> Member:
        """What the host is told of it."""
        place = place_of(self.rollout)
        return Member(self.number, place["index"], place["place"], place["seed"])

    async def run(self, number: int) -> None:
        """Has the member's loop run, for a request of the group loop's, until it has ended, or was cancelled there.

        Cancellation: the loop is cancelled there, and its end waited for.
        """
        run = self._run = _MemberRun(self)
        if 0 in self._lanes:
            self._lanes[0].close()
        try:
            await self._serve(RunLoop(self._group.number, number, self.number))
        finally:
            if not run.over:  # what its other tasks ask for is cut too
                for scope in self._serving.values():
                    scope.cancel()
            try:
                await self._group.cut(run)
            finally:
                self._run = None

    def end_run(self) -> None:
        """The member's loop runs there no more."""
        if self._run is not None:
            self._run.end()
            self._lanes[0].close()

    def leave(self) -> None:
        """It is no member any more, or its group is over."""
        self.end_run()
        self._end()

    def receive(self, message: FromHost) -> None:
        if self.over:
            return
        match message:
            case Ended():
                if self._run is not None:
                    if self._apply(message.edits) and self._failure is None:
                        self._failure = message.failure
                    self.has_ended = True
                    self.end_run()
            case Ask() if self._group.closing or (self._run is not None and self._run.cut_at):
                pass  # it is about to end there
            case _:
                super().receive(message)

    def lose(self, why: str, *, blamed: bool) -> None:
        self.end_run()
        super().lose(why, blamed=blamed)

    def _apply(self, edits: Sequence[Edit], request: Request | None = None) -> bool:
        if self._core.frozen:
            return request is not None  # the rollout itself says that it has ended
        return super()._apply(edits, request)

    async def _answer(self, ask: Ask) -> Answer:
        with self._group.working():
            return await super()._answer(ask)

    def _refuse(self, error: Exception) -> None:
        if self._run is not None:
            super()._refuse(error)
        else:
            self._group.refuse(error)
