"""An agent loop that runs elsewhere, as the engine sees it: on a host, chosen among several.

The engine's rollout is the truth. A `Session` does on it what the loop asks for, as if the loop ran here: the gate, the
journal, limits and slots know no difference, and a pause needs nobody's consent. What comes from a host is checked by
the same code that checks a loop here.

If a host is lost, what its loops had asked the policy for comes to its end and is recorded. Then each raises
`HostLost`, and the engine runs it again, once, on another host, from the journal.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from anyio import CancelScope, Event, create_task_group, current_time
from anyio.abc import TaskGroup

from ._checks import check_real
from ._codecs import Plain, encode, is_plain
from ._context import Context, RolloutCore, RolloutServices
from ._gate import OverLimit
from ._host_messages import (
    Answer,
    Appended,
    Ask,
    Begin,
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
    Scored,
    Stop,
    ToHost,
    UseTool,
    Withdraw,
)
from ._loops import AgentLoop, LoopFunction, as_loop, overrides_generate_group
from ._records import Failure, Message, Turn
from ._response import Response
from ._rollout import Rollout
from ._slots import Call
from .errors import HostLost, LoopError, RollnestError, ToolError, describe

__all__ = ["Host", "HostedLoop"]

_REMEMBERED = 8192  # rollouts of which something is known
_SUSPECT = 2  # how often a rollout's host was lost, until it is looked at


class HostedLoop(AgentLoop):
    """An agent loop that runs on one of several hosts. What they are, and how they are reached, is a subclass's.

    A rollout goes to the host that has the fewest, the least recently chosen of them first; one that runs again, to
    where it ran before. Without any host it waits for one.

    A loop may be what brings its host down. So a rollout that was lost twice becomes a suspect: a host takes one of
    them at a time, and if it goes down then, the others are not to blame.

    Attributes:
        loop: The loop.
        hosts: The hosts that take rollouts now.

    Args:
        loop: The loop: one of its own kind for each sample.
        grace: Seconds for which a host may take to end a loop that was cut. Then it is given up.

    Raises:
        ValueError: The loop overrides `generate_group`, or runs elsewhere already.
    """

    def __init__(self, loop: AgentLoop | LoopFunction, *, grace: float = 5.0) -> None:
        self.loop: AgentLoop = as_loop(loop)
        if isinstance(self.loop, HostedLoop):
            raise ValueError(f"loop must not run elsewhere already, got {self.loop!r}")
        if overrides_generate_group(self.loop):
            raise ValueError(
                f"loop must not override generate_group, which runs with its engine, got {self.loop!r}"
            )
        check_real("grace", grace, 0, open_below=True)
        self.tools: Sequence[Message] | None = self.loop.tools
        self.hosts: list[Host] = []
        self._grace = grace
        self._sessions = 0
        self._setups: dict[int, tuple[RolloutServices, Prepare]] = {}
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._changed = Event()

    def join(self, host: Host) -> None:
        """From now on a host takes rollouts."""
        self.hosts.append(host)
        self._tell()

    def lose(self, host: Host, why: str) -> None:
        """A host is gone, with the loops that ran there. May be called again."""
        if host in self.hosts:
            self.hosts.remove(host)
        host.lose(why)

    @abstractmethod
    def give_up(self, host: Host, why: str) -> None:
        """Ends a host that does not end a loop: afterwards nothing runs there. Calls `lose`, now or soon."""

    async def generate_sample(self, rollout: Rollout) -> None:
        """See `AgentLoop.generate_sample`.

        Raises:
            HostLost: The host was lost; the engine runs it again.

        Cancellation: the loop is cancelled where it runs, and its end waited for, for `grace` seconds. Then its host is
        given up, so that nothing is left there.
        """
        known = self._known.setdefault(rollout.uid, _Known())
        self._known.move_to_end(rollout.uid)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        known.host = host = await self._choose(known)
        self._sessions += 1
        session = _Session(self._sessions, rollout, host, is_suspect=known.is_suspect)
        try:
            await session.serve(self._prepared(rollout, host))
        finally:
            try:
                if not session.over:
                    host.send(End(session.number))
                    with CancelScope(deadline=current_time() + self._grace, shield=True):
                        await session.until_over()
            finally:
                if not session.over:
                    why = f"it did not end the loop of {rollout.uid} in {self._grace} s"
                    self.give_up(host, why)
                host.sessions.pop(session.number, None)
                if session.is_suspect:
                    self._tell()
                known.blamed += session.is_blamed
        session.conclude()

    async def _choose(self, known: _Known) -> Host:
        while not (hosts := self._that_take(known)):
            await self._changed.wait()
        if known.host in hosts:
            return known.host
        host = min(hosts, key=lambda host: len(host.sessions))
        # The next of as many comes first: ties go round.
        self.hosts.remove(host)
        self.hosts.append(host)
        return host

    def _that_take(self, known: _Known) -> list[Host]:
        if not known.is_suspect:
            return self.hosts
        return [host for host in self.hosts if not host.suspects]

    def _tell(self) -> None:
        changed, self._changed = self._changed, Event()
        changed.set()

    def _prepared(self, rollout: Rollout, host: Host) -> Prepare:
        services = _core(rollout).services
        known = self._setups.get(id(services))
        if known is None:
            prepare = Prepare(
                services.task,
                len(self._setups),
                services.capabilities,
                services.tokenizer,
                services.sampling,
                services.max_response_tokens,
                services.max_context,
                services.stop_token_ids,
            )
            known = self._setups[id(services)] = services, prepare
        if known[1].setup not in host.prepared:
            host.send(known[1])
            host.prepared.add(known[1].setup)
        return known[1]


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
        self.sessions: dict[int, _Session] = {}
        self.prepared: set[int] = set()
        self.lost: str | None = None

    def receive(self, message: FromHost) -> None:
        """Takes a message of the host's, in order; synchronous. What nobody waits for any more is dropped."""
        session = self.sessions.get(message.session)
        if session is not None:
            session.receive(message)

    @property
    def suspects(self) -> list[_Session]:
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


class _Known:
    """What is known of a rollout.

    Attributes:
        host: Where it ran last.
        blamed: How often it may have brought a host down.
    """

    __slots__ = ("blamed", "host")

    def __init__(self) -> None:
        self.host: Host | None = None
        self.blamed = 0

    @property
    def is_suspect(self) -> bool:
        return self.blamed >= _SUSPECT


class _Lane:
    """What one of the loop's tasks asks for."""

    def __init__(self) -> None:
        self.asked: deque[Ask] = deque()
        self.told = Event()


class _Running:
    """A tool that the host calls."""

    def __init__(self) -> None:
        self.ran: Ran | None = None
        self.told = Event()


class _Session:
    """One run of a loop, on one host.

    Attributes:
        number: Its own on the host.
        over: Whether nothing more will come of it: the loop has ended there, or the host is lost.
        is_suspect: Whether it may bring its host down.
        is_blamed: Whether it may have.
    """

    def __init__(self, number: int, rollout: Rollout, host: Host, *, is_suspect: bool) -> None:
        self.number = number
        self.over = False
        self.is_suspect = is_suspect
        self.is_blamed = False
        self._rollout = rollout
        self._core = _core(rollout)
        self._send = host.send
        self._host = host
        self._lost: str | None = None
        self._failure: Failure | None = None
        self._over = Event()
        self._lanes: dict[int, _Lane] = {}
        self._serving: dict[int, CancelScope] = {}
        self._running: dict[int, _Running] = {}
        self._tasks: TaskGroup | None = None

    async def serve(self, prepare: Prepare) -> None:
        """Has the loop run, and does what it asks for, until it has ended or is lost.

        Cancellation: the loop still runs there; `End` it.
        """
        rollout, core = self._rollout, self._core
        begin = Begin(
            self.number,
            prepare.setup,
            rollout.prompt,
            array("i", _prompt_ids(core.contexts[0])),
            **_place(rollout),
        )
        self._host.sessions[self.number] = self
        unsent: Exception | None = None
        async with create_task_group() as tasks:
            self._tasks = tasks
            self._lanes[0] = lane = _Lane()
            try:
                self._send(begin)
            except Exception as error:  # raised outside, where it is not in a group
                unsent, self.over = error, True
            try:
                await self._serve_lane(lane)  # of the task that runs the loop, as here
            finally:
                self._tasks = None
            if self._lost is None:
                tasks.cancel_scope.cancel()  # what is left, the loop has not waited for
        if unsent is not None:
            raise unsent

    def conclude(self) -> None:
        """Says how the loop has ended."""
        if self._lost is not None:
            raise HostLost(self._lost, blamed=self.is_blamed)
        if self._failure is not None:
            self._core.failure = self._failure

    async def until_over(self) -> None:
        """Waits until nothing more will come of it."""
        await self._over.wait()

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
            case Withdraw():
                scope = self._serving.get(message.number)
                if scope is not None:
                    scope.cancel()
            case Ended():
                if self._apply(message.edits) and self._failure is None:
                    self._failure = message.failure
                self._end()

    def lose(self, why: str, *, blamed: bool) -> None:
        """The host is gone. A turn or a verdict comes to its end, a tool has gone with it."""
        if not self.over:
            self._lost, self.is_blamed = why, blamed
            self._end()
            for number in self._running:
                self._serving[number].cancel()

    def _queue(self, ask: Ask) -> None:
        lane = self._lanes.get(ask.strand)
        if lane is not None:
            lane.asked.append(ask)
            lane.told.set()
        elif self._tasks is not None:
            lane = self._lanes[ask.strand] = _Lane()
            lane.asked.append(ask)
            self._tasks.start_soon(self._serve_lane, lane, name=f"{self._rollout.uid} of a host")

    def _end(self) -> None:
        self.over = True
        self._over.set()
        for lane in self._lanes.values():
            lane.told.set()

    def _apply(self, edits: Sequence[Edit], request: Request | None = None) -> bool:
        """Does what the loop has done; whether that, and what it asks for, is possible."""
        rollout = self._rollout
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
            self._failure = Failure.of("loop", error)
            self._send(End(self.number))
            return False
        return True

    def _context(self, index: int) -> Context:
        contexts = self._core.contexts
        if not 0 <= index < len(contexts):
            raise LoopError(f"{self._host.name} names context {index} of {len(contexts)}")
        return contexts[index]

    # What it asks for

    async def _serve_lane(self, lane: _Lane) -> None:
        while True:
            while not lane.asked:
                if self.over:
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
            with CancelScope() as scope:
                self._serving[ask.number] = scope
                match ask.request:
                    case Generate(context=index, sampling=sampling, max_tokens=most):
                        at = self._context(index)
                        start, before = len(_columns(at)), _last_turn(core, index)
                        context = at
                        await at.generate(sampling=sampling, max_tokens=most)
                    case UseTool() as request:
                        value, recorded = await self._use_tool(ask.number, request)
                    case Judge():
                        value = await self._rollout.judge()
        except RollnestError as raised:
            error = _bare(raised)
        except Exception as raised:
            error = LoopError(describe(raised))
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

        answer = await self._rollout._use_tool(  # pyright: ignore[reportPrivateUsage]
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
            async with Call(services.tool_slots, f"tool {name}", self._rollout, self._core):
                with limit:
                    ran = await self._run_there(number, key)
        except OverLimit as error:
            raise ToolError(f"tool {name} took over {services.limits.tool} s") from error
        finally:
            self._core.since = services.gate.ended()
        if ran.error is not None:
            raise ran.error
        if not is_plain(ran.value):
            raise LoopError(f"{self._host.name} says that tool {name} returned {ran.value!r}")
        return ran.value

    async def _run_there(self, number: int, key: str) -> Ran:
        running = self._running[number] = _Running()
        try:
            self._send(Run(self.number, number, key))
            await running.told.wait()
        finally:
            del self._running[number]
            if running.ran is None and not self.over:
                self._send(Stop(self.number, number))
        assert running.ran is not None
        return running.ran


def _core(rollout: Rollout) -> RolloutCore:
    return rollout._core  # pyright: ignore[reportPrivateUsage]


def _place(rollout: Rollout) -> dict[str, Any]:
    """What names a rollout, and seeds it."""
    judging = rollout._judging  # pyright: ignore[reportPrivateUsage]
    return {
        "visit": rollout._visit,  # pyright: ignore[reportPrivateUsage]
        "index": rollout.index,
        "place": rollout._place,  # pyright: ignore[reportPrivateUsage]
        "seed": rollout._seed,  # pyright: ignore[reportPrivateUsage]
        "judges_groups": judging is not None and judging.by_group,
    }


def _prompt_ids(context: Context) -> memoryview[int]:
    return context._prompt_ids  # pyright: ignore[reportPrivateUsage]


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


def _bare(error: RollnestError) -> RollnestError:
    """An error without the frames that it came through."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error
