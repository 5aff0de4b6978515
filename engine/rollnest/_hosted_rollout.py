"""The rollout that a loop holds whose engine is elsewhere.

What a loop does at once (appends, contexts, scores) is done here by the engine's own code, and told to the engine with
what the loop asks for next. Turns, verdicts and the recording of tools are asked for; the tools themselves run here.
What comes from the engine is taken in synchronously, as it comes. So a loop that is cancelled misses nothing that its
rollout has.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar, TypeVarTuple, cast, overload

from anyio import CancelScope

from ._attempt import TokenCounters
from ._clock import loop_clock
from ._codecs import decode, encode
from ._context import Context, RolloutCore, RolloutServices
from ._continuation import check_sampling
from ._gate import Gate
from ._host_messages import (
    Answer,
    Appended,
    Begin,
    Edit,
    End,
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
)
from ._host_requests import Requests, Waiting
from ._instruments import Instruments
from ._journal import OnUnknown, ToolReplay
from ._judging import GroupJudging
from ._options import Limits, Sampling
from ._outage import Outage
from ._records import Message, Prompt, Sample, Turn, Verdict
from ._response import Response
from ._rollout import Rollout, in_tool, tool_identity
from ._scopes import loop_scopes, loop_tasks
from ._slots import Slots
from ._workers import Workers
from .abc import InferenceController
from .errors import LoopError, RollnestError

__all__ = ["HostedRollout", "services_of"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_strands: ContextVar[tuple[int, dict[Requests, int]]] = ContextVar("rollnest_strands")
"""The task that has asked for something, and its strand in each session; no child's."""


class HostedRollout(Rollout):
    """One sample in the making, whose engine is elsewhere.

    Attributes:
        scope: Around its loop.
    """

    __slots__ = ("_judges_groups", "_requests", "_send", "_strands", "scope")

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
        self._send = send
        self._requests = Requests(begin.session, send)
        self._core.ask = self.ask
        self._strands = 0
        self.scope = CancelScope()

    def _make_core(self, services: RolloutServices, prompt: Prompt, uid: str) -> RolloutCore:
        return _HostedCore(services, prompt, uid)

    @property
    def session(self) -> int:
        """Its number."""
        return self._requests.session

    @property
    def place(self) -> int:
        """How many rollouts there were before it in its place of the group."""
        return self._place

    @property
    def requests(self) -> int:
        """What it has asked for and not got yet."""
        return len(self._requests.waiting)

    # From the engine

    def receive(self, message: ToHost) -> None:
        """Takes a message of the engine's; synchronous."""
        match message:
            case Answer():
                self._take_in(message)
                self._requests.take(message)
            case Run():
                self._requests.want(message.number, message.key)
            case Stop():
                self._requests.stop(message.number)
            case End():
                self.end()
            case _:  # of a group's only
                pass

    def end(self) -> None:
        """Its loop is to end; the engine answers nothing any more."""
        self._requests.ending = True
        self.scope.cancel()

    def _take_in(self, answer: Answer) -> None:
        core = self._core
        core.cut = core.cut or answer.cut
        if answer.failure is not None:
            core.failure = answer.failure
        if answer.grown is not None:
            context = core.contexts[answer.context]
            assert isinstance(context, _HostedContext)
            context.grow(answer.grown)

    def ended(self, sample: Sample) -> None:
        """The engine has made its sample, perhaps without having its loop run here."""
        core = self._core
        core.frozen = True
        if len(core.turns) < len(sample.turns):
            core.turns[:] = sample.turns

    def close(self) -> Sequence[Edit]:
        """Its loop has ended; returns what it did since it last asked."""
        self._core.frozen = True
        return self.take_edits()

    def take_edits(self) -> Sequence[Edit]:
        """Returns what the loop did since it last asked."""
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

        async def run(waiting: Waiting, key: str) -> Any:
            assert call is not None
            return await self._call(waiting, key, call)

        edits = self.take_edits()
        return await self._requests.ask(request, run, strand=self._strand(), edits=edits)

    async def _call(
        self,
        waiting: Waiting,
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
                ran = Ran(self.session, waiting.number, value)
            except RollnestError as error:
                ran = Ran(self.session, waiting.number, error=error)
        waiting.scope = None
        if ran is not None:
            self._send(ran)
        return returned

    def _strand(self) -> int:
        task = id(self._core.services.current_task())
        if task == self._core.main:
            return 0
        known = _strands.get(None)
        if known is None or known[0] != task:
            known = task, dict[Requests, int]()
            _strands.set(known)
        strands = known[1]
        if self._requests not in strands:
            self._strands += 1
            strands[self._requests] = self._strands
        return strands[self._requests]

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
        if core.frozen:
            raise LoopError(
                f"generate() on rollout {core.uid}, which has ended: its sample was made"
            )
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


def services_of(prepare: Prepare, workers: Workers) -> RolloutServices:
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
