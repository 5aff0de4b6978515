"""What runs on a host, as the engine sees it: the host, and sessions, each one run of a loop on one rollout.

A `Session` does on the engine's rollout what the loop asks for, as if the loop ran here. What comes from a host is
checked by the same code that checks a loop here.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from anyio import CancelScope, Event, create_task_group
from anyio.abc import TaskGroup

from ._codecs import Plain, encode, is_plain
from ._context import Context, RolloutCore
from ._gate import OverLimit
from ._host_messages import (
    Answer,
    Appended,
    Ask,
    Begin,
    Did,
    Edit,
    End,
    Ended,
    Failed,
    Finished,
    FromHost,
    Generate,
    Grown,
    Judge,
    Opened,
    Prepare,
    Ran,
    Request,
    Run,
    RunLoop,
    Scored,
    Stop,
    ToHost,
    UseTool,
    Withdraw,
)
from ._records import Failure, Turn
from ._response import Response
from ._rollout import Rollout, begin_loop
from ._slots import Call
from .errors import HostLost, LoopError, RollnestError, ToolError, describe

__all__ = ["Ending", "Host", "Running", "Session", "bare", "core_of", "place_of", "prompt_ids_of"]


class Ending(Protocol):
    """Something that runs on a host, and can be told to end.

    Attributes:
        number: Its own on the host.
        uid: Its name.
        host: Where it runs.
        over: Whether nothing more will come of it: the loop has ended there, or the host is lost.
        cut_at: When the loop was told to end.
    """

    number: int
    uid: str
    host: Host
    over: bool
    cut_at: float | None

    async def until_over(self) -> None:
        """Waits until nothing more will come of it."""


class Running(Ending, Protocol):
    """What a host has a number for.

    Attributes:
        is_suspect: Whether it may bring its host down.
        is_blamed: Whether it may have.
    """

    is_suspect: bool
    is_blamed: bool

    def receive(self, message: FromHost) -> None:
        """Takes a message of the host's; synchronous."""

    def lose(self, why: str, *, blamed: bool) -> None:
        """The host is gone."""

    def forget(self) -> None:
        """What the host still says of it is dropped."""


class Host:
    """One place where loops run, as the engine sees it.

    Attributes:
        name: What it is called.
        send: Takes what is for it, in order; never blocks.
        sessions: What runs there.
        prepared: Setups that it knows.
        lost: Why it is gone; `None` while it is not.
    """

    def __init__(self, name: str, send: Callable[[ToHost], None]) -> None:
        self.name = name
        self.send = send
        self.sessions: dict[int, Running] = {}
        self.prepared: set[int] = set()
        self.lost: str | None = None

    def receive(self, message: FromHost) -> None:
        """Takes a message of the host's, in order; synchronous. What nobody waits for any more is dropped."""
        session = self.sessions.get(message.session)
        if session is not None:
            session.receive(message)

    @property
    def suspects(self) -> list[Running]:
        """Those that may be what brings it down, if anything does."""
        return [session for session in self.sessions.values() if session.is_suspect]

    def lose(self, why: str) -> None:
        """It is gone; see `HostedLoop.lose`."""
        if self.lost is None:
            self.lost = why
            sessions = list(self.sessions.values())
            blamed = self.suspects or sessions
            for session in sessions:
                session.lose(f"{self.name}: {why}", blamed=session in blamed)

    def __repr__(self) -> str:
        state = f"lost: {self.lost}" if self.lost else f"{len(self.sessions)} rollouts"
        return f"<Host {self.name}: {state}>"


class _Lane:
    """What one of the loop's tasks asks for.

    Attributes:
        tasks: Where it is served.
        asked: What is to be done next.
        told: Whether there is news.
        closed: Whether nothing more will come.
    """

    def __init__(self, tasks: TaskGroup) -> None:
        self.tasks = tasks
        self.asked: deque[Ask] = deque()
        self.told = Event()
        self.closed = False

    def close(self) -> None:
        """Nothing more will come."""
        self.closed = True
        self.told.set()


class _RunningTool:
    """A tool that the host calls."""

    def __init__(self) -> None:
        self.ran: Ran | None = None
        self.told = Event()


class Session:
    """One run of a loop on one rollout, on one host.

    Attributes:
        number: Its own on the host.
        uid: The rollout's name.
        rollout: The engine's rollout.
        host: Where the loop runs.
        over: Whether nothing more will come of it: the loop has ended there, or the host is lost.
        cut_at: When the loop was told to end.
        is_suspect: Whether it may bring its host down.
        is_blamed: Whether it may have.
    """

    def __init__(
        self, number: int, rollout: Rollout, host: Host, *, is_suspect: bool = False
    ) -> None:
        self.number = number
        self.uid = rollout.uid
        self.rollout = rollout
        self.host = host
        self.over = False
        self.cut_at: float | None = None
        self.is_suspect = is_suspect
        self.is_blamed = False
        self._core = core_of(rollout)
        self._send = host.send
        self._lost: str | None = None
        self._failure: Failure | HostLost | None = None
        self._over = Event()
        self._lanes: dict[int, _Lane] = {}
        self._serving: dict[int, CancelScope] = {}
        self._running: dict[int, _RunningTool] = {}
        self._tasks: TaskGroup | None = None

    async def serve(self, prepare: Prepare) -> None:
        """Has the loop run, and does what it asks for, until it has ended or is lost.

        Cancellation: the loop still runs there; `End` it.
        """
        rollout = self.rollout
        self.host.sessions[self.number] = self
        await self._serve(
            Begin(
                self.number,
                prepare.setup,
                rollout.prompt,
                array("i", prompt_ids_of(rollout)),
                **place_of(rollout),
            )
        )

    async def _serve(self, begin: Begin | RunLoop) -> None:
        unsent: Exception | None = None
        async with create_task_group() as tasks:
            before = self._tasks
            if before is None:
                self._tasks = tasks
            self._lanes[0] = lane = _Lane(tasks)
            try:
                self._send(begin)
            except Exception as error:  # raised outside, where it is not in a group
                unsent, self.over = error, True
                lane.close()
            try:
                await self._serve_lane(lane)  # of the task that runs the loop, as here
            finally:
                self._tasks = before
            if self._lost is None:
                tasks.cancel_scope.cancel()  # what is left, the loop has not waited for
        self._lanes = {n: lane for n, lane in self._lanes.items() if lane.tasks is not tasks}
        if unsent is not None:
            raise unsent

    def conclude(self) -> None:
        """Says how the loop has ended."""
        if self._lost is not None:
            raise HostLost(self._lost, blamed=self.is_blamed)
        if isinstance(self._failure, HostLost):
            raise self._failure
        if self._failure is not None:
            self._core.failure = self._failure

    async def until_over(self) -> None:
        """Waits until nothing more will come of it."""
        await self._over.wait()

    def forget(self) -> None:
        """What the host still says of it is dropped."""
        self.host.sessions.pop(self.number, None)

    # From the host

    def receive(self, message: FromHost) -> None:
        """Takes a message of the host's; synchronous."""
        if self.over:
            return
        match message:
            case Ask():
                if self._apply(message.edits, message.request):
                    self._queue(message)
            case Ran():
                running = self._running.get(message.number)
                if running is not None:
                    running.ran = message
                    running.told.set()
            case Did():
                self._apply(message.edits)
            case Withdraw():
                scope = self._serving.get(message.number)
                if scope is not None:
                    scope.cancel()
            case Ended():
                if self._apply(message.edits) and self._failure is None:
                    self._failure = message.failure
                self._end()
            case _:  # of a group's only
                pass

    def lose(self, why: str, *, blamed: bool) -> None:
        """The host is gone. A turn or a verdict comes to its end, a tool has gone with it."""
        if not self.over:
            self._lost, self.is_blamed = why, blamed
            self._end()
            for number in self._running:
                self._serving[number].cancel()

    def _queue(self, ask: Ask) -> None:
        lane = self._lanes.get(ask.strand)
        if lane is None or lane.closed:
            if self._tasks is None:
                return
            lane = self._lanes[ask.strand] = _Lane(self._tasks)
            name = f"{self.uid} of a host"
            self._tasks.start_soon(self._serve_strand, lane, ask.strand, name=name)
        self._serving[ask.number] = CancelScope()
        lane.asked.append(ask)
        lane.told.set()

    def _end(self) -> None:
        self.over = True
        self._over.set()
        for lane in self._lanes.values():
            lane.close()

    def _apply(self, edits: Sequence[Edit], request: Request | None = None) -> bool:
        """Does what the loop has done; whether that, and what it asks for, is possible."""
        rollout = self.rollout
        if self._core.frozen:  # it was cut meanwhile
            return False
        try:
            for edit in edits:
                match edit:
                    case Opened(prompt_ids=ids):
                        rollout.segment(ids)
                    case Appended(context=index, ids=ids):
                        self._context(index).append(ids)
                    case Scored(verdict=verdict):
                        rollout.score(verdict.score, **verdict.parts)
                    case Finished(reason=reason):
                        rollout.finish(reason)
                    case Failed(reason=reason):
                        rollout.fail(reason)
            if isinstance(request, Generate):
                self._context(request.context)
        except Exception as error:
            self._refuse(error)
            return False
        return True

    def _refuse(self, error: Exception) -> None:
        """The loop has done what is not possible: it fails."""
        self._failure = Failure.of("loop", error)
        self._send(End(self.number))

    def _context(self, index: int) -> Context:
        contexts = self._core.contexts
        if not 0 <= index < len(contexts):
            raise LoopError(f"{self.host.name} names context {index} of {len(contexts)}")
        return contexts[index]

    # What it asks for

    async def _serve_strand(self, lane: _Lane, strand: int) -> None:
        if strand == 0:
            begin_loop(self.rollout)
        await self._serve_lane(lane)

    async def _serve_lane(self, lane: _Lane) -> None:
        while True:
            while not lane.asked:
                if lane.closed:
                    return
                lane.told = Event()
                await lane.told.wait()
            answer = await self._answer(lane.asked.popleft())
            if not self.over:
                self._send(answer)

    async def _answer(self, ask: Ask) -> Answer:
        """Does what is asked for.

        A withdrawn request has an answer too: what it had brought.
        """
        core = self._core
        error: RollnestError | None = None
        value: Any = None
        recorded = False
        grown: Grown | None = None
        context: Context | None = None
        before: Turn | None = None
        start = 0
        try:
            with self._serving[ask.number] as scope:
                match ask.request:
                    case Generate(context=index, sampling=sampling, max_tokens=most):
                        at = self._context(index)
                        start, before = len(_columns(at)), _last_turn(core, index)
                        context = at
                        await at.generate(sampling=sampling, max_tokens=most)
                    case UseTool() as request:
                        value, recorded = await self._use_tool(ask.number, request)
                    case Judge():
                        value = await self.rollout.judge()
                    case request:
                        raise LoopError(f"{self.host.name} asks {self.uid} for {request!r}")
        except RollnestError as raised:
            error = bare(raised)
        except Exception as raised:
            error = LoopError(describe(raised))
        else:
            if scope.cancelled_caught:
                error = LoopError(f"what was asked of rollout {self.uid} was cut")
        finally:
            del self._serving[ask.number]
        index = 0
        if context is not None and isinstance(ask.request, Generate):
            index = ask.request.context
            turn = _last_turn(core, index)
            grown = _grown(context, start, None if turn is before else turn)
        return Answer(
            self.number, ask.number, error, recorded, value, index, grown, core.cut, core.failure
        )

    async def _use_tool(self, number: int, request: UseTool) -> tuple[Plain, bool]:
        """Has a tool recorded and called by the host, or gives its record; says whether that."""
        ran: list[Plain] = []

        async def call(key: str) -> tuple[None, Plain]:
            ran.append(await self._run_tool(number, request.name, key))
            return None, ran[0]

        answer = await self.rollout._use_tool(  # pyright: ignore[reportPrivateUsage]
            request.name,
            request.asked,
            replay=request.replay,
            on_unknown=request.on_unknown,
            call=call,
        )
        return (None, False) if ran else (encode(answer, f"tool {request.name} returned"), True)

    async def _run_tool(self, number: int, name: str, key: str) -> Plain:
        services = self._core.services
        limit = services.gate.limit(services.limits.tool)
        try:
            async with Call(services.tool_slots, f"tool {name}", self.rollout, self._core):
                with limit:
                    ran = await self._run_there(number, key)
        except OverLimit as error:
            raise ToolError(f"tool {name} took over {services.limits.tool} s") from error
        finally:
            self._core.since = services.gate.ended()
        if ran.error is not None:
            raise ran.error
        if not is_plain(ran.value):
            raise LoopError(f"{self.host.name} says that tool {name} returned {ran.value!r}")
        return ran.value

    async def _run_there(self, number: int, key: str) -> Ran:
        running = self._running[number] = _RunningTool()
        try:
            self._send(Run(self.number, number, key))
            await running.told.wait()
        finally:
            del self._running[number]
            if running.ran is None and not self.over:
                self._send(Stop(self.number, number))
        assert running.ran is not None
        return running.ran


def core_of(rollout: Rollout) -> RolloutCore:
    """What its contexts share."""
    return rollout._core  # pyright: ignore[reportPrivateUsage]


def place_of(rollout: Rollout) -> dict[str, Any]:
    """What names a rollout, and seeds it."""
    judging = rollout._judging  # pyright: ignore[reportPrivateUsage]
    return {
        "visit": rollout._visit,  # pyright: ignore[reportPrivateUsage]
        "index": rollout.index,
        "place": rollout._place,  # pyright: ignore[reportPrivateUsage]
        "seed": rollout._seed,  # pyright: ignore[reportPrivateUsage]
        "judges_groups": judging is not None and judging.by_group,
    }


def prompt_ids_of(rollout: Rollout) -> memoryview[int]:
    """The tokens of its first context's prompt."""
    first = core_of(rollout).contexts[0]
    return first._prompt_ids  # pyright: ignore[reportPrivateUsage]


def _columns(context: Context) -> Response:
    """The live columns, for reading at once."""
    return context._response  # pyright: ignore[reportPrivateUsage]


def _last_turn(core: RolloutCore, context: int) -> Turn | None:
    return next((turn for turn in reversed(core.turns) if turn.segment == context), None)


def _grown(context: Context, start: int, turn: Turn | None) -> Grown | None:
    columns = _columns(context)[start:]
    if turn is None:
        return Grown(start, columns, None, None, 0) if columns else None
    return Grown(start, columns, turn.finish_reason, turn.text, turn.attempts)


def bare(error: RollnestError) -> RollnestError:
    """An error without the frames that it came through."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error
