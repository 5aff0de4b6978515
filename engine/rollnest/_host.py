"""The place that runs agent loops for an engine elsewhere: it owns the loops, and nothing of what they make.

A loop gets a `HostedRollout`. What a loop does at once (appends, contexts, scores) is done there by the engine's own
code, and told to the engine with what it asks for next. Turns, verdicts and the recording of tools are asked for; the
tools themselves run here. So the engine's rollout stays the truth: gate, journal, limits and slots are there, and if
this place is lost, nothing is lost but the time that a loop's own code took.

What comes from the engine is taken in synchronously, as it comes. So a loop that is cancelled misses nothing that its
rollout has.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar, TypeVarTuple, cast, overload

from anyio import CancelScope, Event, create_task_group, get_cancelled_exc_class
from anyio.abc import TaskGroup

from ._attempt import TokenCounters
from ._clock import loop_clock
from ._codecs import decode, encode
from ._context import Context, RolloutCore, RolloutServices
from ._continuation import check_sampling
from ._gate import Gate
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
from ._instruments import Instruments
from ._journal import OnUnknown, ToolReplay
from ._judging import GroupJudging
from ._loops import AgentLoop, LoopFunction, as_loop
from ._members import cancellation_alone, kind_of
from ._options import Limits, Sampling
from ._outage import Outage
from ._records import Failure, Message, Prompt, Turn, Verdict
from ._response import Response
from ._rollout import Rollout, begin_loop, in_tool, tool_identity
from ._scopes import loop_scopes, loop_tasks
from ._slots import Slots
from ._stray import is_stray
from ._workers import Workers
from .abc import InferenceController
from .errors import LoopError, RollnestError, leaves

__all__ = ["LoopHost"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_GRACE = 5.0
"""Seconds for which a call that the loop cancelled waits for what it had brought."""

_strand: ContextVar[tuple[int, HostedRollout, int]] = ContextVar("rollnest_strand")
"""The task that has asked for something, of which rollout, and its strand there; as in `Rollout`, no child's."""


class LoopHost:
    """Runs agent loops whose engine is elsewhere, while its block is open.

        async with LoopHost(loop, send) as host:
            ...  # host.receive(message) for each message of the engine, in order

    Leaving the block cancels the loops that still run, and waits for them.

    Args:
        loop: The loop. Each of its runs has a rollout of its own.
        send: Takes what is for the engine, in order; must not block.
        exit_grace: Seconds to wait at the end for tools in worker threads, which can't be stopped.
    """

    def __init__(
        self,
        loop: AgentLoop | LoopFunction,
        send: Callable[[FromHost], None],
        *,
        exit_grace: float = 5.0,
    ) -> None:
        self.loop: AgentLoop = as_loop(loop)
        self._send = send
        self._exit_grace = exit_grace
        self._setups: dict[int, RolloutServices] = {}
        self._sessions: dict[int, HostedRollout] = {}
        self._workers = Workers()
        self._tasks: TaskGroup | None = None

    @property
    def sessions(self) -> tuple[str, ...]:
        """Names of the rollouts whose loops run here."""
        return tuple(rollout.uid for rollout in self._sessions.values())

    @property
    def requests(self) -> int:
        """What these have asked the engine for and not got yet."""
        return sum(rollout.requests for rollout in self._sessions.values())

    @property
    def abandoned(self) -> str:
        """Names of tools whose thread can't be stopped, and for which nobody waits any more."""
        return self._workers.names

    async def __aenter__(self) -> LoopHost:
        self._tasks = create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        tasks.cancel_scope.cancel()
        try:
            await tasks.__aexit__(exc_type, exc, traceback)
        finally:
            with CancelScope(shield=True):  # bounded by its own grace
                await self._workers.drain(self._exit_grace)

    def receive(self, message: ToHost) -> None:
        """Takes a message of the engine's; synchronous."""
        if isinstance(message, Prepare):
            self._setups[message.setup] = _services(message, self._workers)
        elif isinstance(message, Begin):
            self._begin(message)
        elif (rollout := self._sessions.get(message.session)) is not None:
            rollout.receive(message)

    def _begin(self, begin: Begin) -> None:
        if self._tasks is None:
            return  # it is being left: the engine hears of that
        rollout = HostedRollout(self._setups[begin.setup], begin, self.loop.tools, self._send)
        self._sessions[begin.session] = rollout
        self._tasks.start_soon(self._run, begin.session, rollout, name=rollout.uid)

    async def _run(self, session: int, rollout: HostedRollout) -> None:
        """Runs the loop on one rollout, and says how it has ended."""
        failure: Failure | None = None
        has_ended = False
        try:
            with rollout.scope:
                try:
                    begin_loop(rollout)
                    await self.loop.generate_sample(rollout)
                except Exception as error:
                    failure = Failure.of(kind_of(error), error)
                except BaseException as error:
                    if is_stray(error):
                        failure = Failure("loop", "the agent loop cancelled itself")
                    elif isinstance(error, BaseExceptionGroup):
                        group = cast("BaseExceptionGroup[BaseException]", error)
                        raise cancellation_alone(rollout.uid, group) from None
                    else:
                        raise
            has_ended = True
        except BaseException as error:
            if not all(isinstance(leaf, get_cancelled_exc_class()) for leaf in leaves(error)):
                failure, has_ended = Failure.of("loop", error), True  # an exit, of this process
            raise
        finally:
            # No await from here on. Of a loop that was cut with its host, nobody says that it has ended.
            del self._sessions[session]
            edits = rollout.close()
            if has_ended:
                self._send(Ended(session, edits, failure))

    def __repr__(self) -> str:
        return f"<LoopHost of {self.loop!r}: {len(self._sessions)} rollouts>"


class _Waiting:
    """A request that was sent to the engine."""

    __slots__ = ("answer", "key", "scope", "stopped", "told")

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.key: str | None = None  # of the tool that is to be called now
        self.scope: CancelScope | None = None  # of the tool
        self.stopped = False
        self.told = Event()

    async def wait(self) -> None:
        """Waits for what comes next."""
        while self.answer is None and self.key is None:
            self.told = Event()
            await self.told.wait()

    async def wait_answer(self) -> None:
        """Waits for the answer."""
        while self.answer is None:
            self.told = Event()
            await self.told.wait()


class HostedRollout(Rollout):
    """One sample in the making, whose engine is elsewhere.

    Attributes:
        scope: Around its loop.
    """

    __slots__ = (
        "_asked",
        "_ending",
        "_judges_groups",
        "_send",
        "_session",
        "_strands",
        "_waiting",
        "scope",
    )

    _core: _HostedCore

    def __init__(
        self,
        services: RolloutServices,
        begin: Begin,
        tools: Sequence[Message] | None,
        send: Callable[[FromHost], None],
    ) -> None:
        prompt = begin.prompt
        super().__init__(
            services,
            prompt,
            memoryview(begin.prompt_ids).toreadonly(),
            visit=begin.visit,
            index=begin.index,
            place=begin.place,
            tools=prompt.tools or tools,
        )
        self._seed = begin.seed
        self._judges_groups = begin.judges_groups
        self._session = begin.session
        self._send = send
        self._core.ask = self.ask
        self._asked = 0
        self._strands = 0
        self._ending = False
        self._waiting: dict[int, _Waiting] = {}
        self.scope = CancelScope()

    def _make_core(self, services: RolloutServices, prompt: Prompt, uid: str) -> RolloutCore:
        return _HostedCore(services, prompt, uid)

    @property
    def requests(self) -> int:
        """What it has asked for and not got yet."""
        return len(self._waiting)

    # From the engine

    def receive(self, message: Run | Answer | Stop | End) -> None:
        """Takes a message of the engine's; synchronous."""
        if isinstance(message, End):
            self._ending = True
            self.scope.cancel()
            return
        waiting = self._waiting.get(message.number)
        match message:
            case Answer():
                self._take_in(message)
                if waiting is not None:
                    waiting.answer = message
                    waiting.told.set()
                    if waiting.scope is not None:
                        waiting.scope.cancel()  # the engine waits for the tool no more
            case Run(key=key):
                if waiting is not None:
                    waiting.key = key
                    waiting.told.set()
            case Stop():
                if waiting is not None:
                    waiting.stopped = True
                    if waiting.scope is not None:
                        waiting.scope.cancel()

    def _take_in(self, answer: Answer) -> None:
        core = self._core
        core.cut = core.cut or answer.cut
        if answer.failure is not None:
            core.failure = answer.failure
        if answer.grown is not None:
            context = core.contexts[answer.context]
            assert isinstance(context, _HostedContext)
            context.grow(answer.grown)

    def close(self) -> Sequence[Edit]:
        """Its loop has ended; returns what it did since it last asked."""
        self._core.frozen = True
        return self._core.take_edits()

    # To the engine

    async def ask(
        self, request: Request, call: Callable[[], Awaitable[tuple[Any, Any]]] | None = None
    ) -> tuple[Answer, Any]:
        """Asks the engine for something.

        Args:
            request: What.
            call: Calls the tool, if that is what is asked for and the engine says so.

        Returns:
            The answer, and what the tool returned.

        Cancellation: the engine is told, and what came of it so far is waited for.
        """
        number, self._asked = self._asked, self._asked + 1
        waiting = self._waiting[number] = _Waiting()
        returned: Any = None
        edits = self._core.take_edits()
        self._send(Ask(self._session, number, self._strand(), edits, request))
        try:
            await waiting.wait()
            if waiting.key is not None and waiting.answer is None and call is not None:
                returned = await self._call(number, waiting, waiting.key, call)
                await waiting.wait_answer()
        except BaseException:
            if waiting.answer is None and not self._ending:
                self._send(Withdraw(self._session, number))
                clock = self._core.services.gate.clock
                with CancelScope(deadline=clock() + _GRACE, shield=True):
                    await waiting.wait_answer()
            raise
        finally:
            del self._waiting[number]
        answer = waiting.answer
        assert answer is not None
        if answer.error is not None:
            raise answer.error
        return answer, returned

    async def _call(
        self,
        number: int,
        waiting: _Waiting,
        key: str,
        call: Callable[[], Awaitable[tuple[Any, Any]]],
    ) -> Any:
        """Calls a tool, and says how it has ended, unless the engine has stopped it."""
        if waiting.stopped:
            return None
        ran, returned = None, None
        with CancelScope() as scope:
            waiting.scope = scope
            try:
                with in_tool(key):
                    returned, value = await call()
                ran = Ran(self._session, number, value)
            except RollnestError as error:
                ran = Ran(self._session, number, error=error)
        waiting.scope = None
        if ran is not None:
            self._send(ran)
        return returned

    def _strand(self) -> int:
        task = id(self._core.services.current_task())
        if task == self._core.main:
            return 0
        known = _strand.get(None)
        if known is not None and known[:2] == (task, self):
            return known[2]
        self._strands += 1
        _strand.set((task, self, self._strands))
        return self._strands

    # What a loop does

    @overload
    async def tool(
        self,
        function: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        replay: ToolReplay = "recorded",
        on_unknown: OnUnknown = "rerun",
    ) -> T: ...
    @overload
    async def tool(
        self,
        function: Callable[[*Ts], T],
        *args: *Ts,
        replay: ToolReplay = "recorded",
        on_unknown: OnUnknown = "rerun",
    ) -> T: ...

    async def tool(
        self,
        function: Callable[[*Ts], Any],
        *args: *Ts,
        replay: ToolReplay = "recorded",
        on_unknown: OnUnknown = "rerun",
    ) -> Any:
        name = self._check_tool(function, replay, on_unknown)

        async def call() -> tuple[Any, Any]:
            answer = await self._call_tool(name, function, *args)
            return answer, encode(answer, f"tool {name} returned")

        asked = tool_identity(function, args)
        answer, returned = await self.ask(UseTool(name, asked, replay, on_unknown), call)
        return decode(cast("Any", answer.value)) if answer.recorded else returned

    def score(self, value: float, /, **parts: float) -> None:
        super().score(value, **parts)
        assert self._scored is not None
        self._core.edits.append(Scored(self._scored))

    async def judge(self) -> Verdict:
        self._check_judging("judge()")
        if self._scored is not None:
            return await super().judge()
        answer, _ = await self.ask(Judge())
        return cast("Verdict", answer.value)

    def finish(self, reason: str) -> None:
        super().finish(reason)
        self._core.edits.append(Finished(reason))

    def fail(self, reason: str) -> None:
        super().fail(reason)
        self._core.edits.append(Failed(reason))

    def _check_judging(self, what: str) -> GroupJudging | None:
        super()._check_judging(what)
        if self._judges_groups:
            raise LoopError(f"{what} on a task whose judger judges whole groups")
        return None


class _HostedCore(RolloutCore):
    """What the contexts of one hosted rollout share.

    Attributes:
        edits: What the loop did since it last asked.
        ask: Asks the engine.
    """

    __slots__ = ("ask", "edits")

    ask: Callable[[Request], Awaitable[tuple[Answer, Any]]]

    def __init__(self, services: RolloutServices, prompt: Prompt, uid: str) -> None:
        super().__init__(services, prompt, uid)
        self.edits: list[Edit] = []

    def open_checked(
        self,
        prompt_ids: memoryview[int],
        messages: Sequence[Message] | None = None,
        tools: Sequence[Message] | None = None,
    ) -> Context:
        context = _HostedContext(self, prompt_ids, len(self.contexts), messages, tools)
        if self.contexts:  # the engine knows the first one
            self.edits.append(Opened(array("i", prompt_ids)))
        self.contexts.append(context)
        return context

    def take_edits(self) -> Sequence[Edit]:
        """Returns what the loop did since it last asked."""
        edits, self.edits = self.edits, []
        return edits


class _HostedContext(Context):
    """One context of a hosted rollout."""

    __slots__ = ()

    _core: _HostedCore

    async def generate(
        self, *, sampling: Sampling | None = None, max_tokens: int | None = None
    ) -> Turn:
        core = self._core
        if self._busy:
            raise LoopError("two generate() at once on one context; open another with segment()")
        cap = max_tokens or (sampling or core.services.sampling).max_tokens
        self._busy = True
        self._reserved = len(self._response) + min(cap, self._room)
        try:
            await core.ask(Generate(self._index, sampling, max_tokens))
        finally:
            self._busy = False
            self._reserved = 0
        return next(turn for turn in reversed(core.turns) if turn.segment == self._index)

    def append(self, content: str | Iterable[int]) -> None:
        core = self._core
        if isinstance(content, str):
            content = core.tokenizer("append(text)").encode(content)
        ids = core.checked(content)
        super().append(ids)
        core.edits.append(Appended(self._index, ids))

    def grow(self, grown: Grown) -> None:
        """Takes over what the engine's context has got."""
        start = grown.start
        if start < len(self._response):  # the engine had less room, and has cut what was appended
            self._response = _growing(self._response[:start])
        self._extend(grown.columns)
        stop = len(self._response)
        if grown.finish_reason is None:
            return
        turn = Turn(
            grown.finish_reason,
            grown.text,
            self._index,
            start,
            stop,
            grown.attempts,
            self._response,
        )
        self._core.turns.append(turn)
        if self._messages is not None:
            self._messages.append(turn.message)


def _growing(part: Response) -> Response:
    response = Response()
    response.extend(part)
    return response


def _services(prepare: Prepare, workers: Workers) -> RolloutServices:
    """What hosted rollouts of one task use: limits, slots and the gate are the engine's."""
    clock, instruments = loop_clock(), Instruments([])
    gate = Gate(version=0, slots=Slots(None, clock), clock=clock, new_scope=loop_scopes())
    outage = Outage(gate, instruments, math.inf)
    with outage.bell:
        pass  # closed: no server is probed here
    return RolloutServices(
        task=prepare.task,
        controller=cast("InferenceController", None),  # hosted contexts ask the engine
        capabilities=prepare.capabilities,
        gate=gate,
        outage=outage,
        tokenizer=prepare.tokenizer,
        workers=workers,
        tool_slots=Slots(None, clock, name="tool slot"),
        counters=TokenCounters(),
        instruments=instruments,
        sampling=prepare.sampling,
        partial=True,
        limits=Limits(tool=None, judge=None),
        max_response_tokens=prepare.max_response_tokens,
        max_context=prepare.max_context,
        check=check_sampling,
        stop_token_ids=prepare.stop_token_ids,
        seed=0,
        current_task=loop_tasks(),
        newest_version=gate.newest_version,
    )
