"""One unbroken token context of a rollout, and the turns that the policy takes in it.

Ids that went to the policy are never decoded and encoded again (I4): what is sent for a turn is the context's
prompt ids and everything after them. Budgets are always derived from what is there, never stored (I5). A turn
that meets a pause keeps its partial and goes on with what remains of its cap.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from anyio.lowlevel import checkpoint
from attrs import evolve, frozen

from ._attempt import Attempt, FinishReason, TokenCounters
from ._capture import ContextNote, RunningTurn
from ._continuation import attempt_seed, tokens_through_stop
from ._gate import Gate, Limit, OverLimit
from ._instruments import Instruments
from ._journal import AS_THE_TASK, ContextReplay, Journal, Replay, Request
from ._making import make_segment, make_turn
from ._options import Limits, Sampling
from ._outage import Outage, Retries
from ._records import Failure, Message, Prompt, Segment, Turn
from ._response import Response, token_column
from ._slots import Slots
from ._stray import is_stray
from ._tree import Wait
from ._workers import Workers
from .abc import Capabilities, InferenceController, Tokenizer
from .errors import DataError, InferenceError, LoopError, UnsupportedSampling, describe

__all__ = [
    "Context",
    "LaterContext",
    "RolloutCore",
    "RolloutServices",
    "freeze_context",
    "note_context",
    "read_context_note",
]

_NOTHING = Response().seal()
_STOP, _LENGTH = FinishReason.STOP, FinishReason.LENGTH

_Came: TypeAlias = "tuple[Response, int, FinishReason | None, Sampling]"
_Asked: TypeAlias = "tuple[int, Request]"
_Noted: TypeAlias = (
    "tuple[memoryview[int], RolloutServices, Response, int, _Came | None, _Asked | None, int, int]"
)
LaterContext: TypeAlias = "_Noted | tuple[ContextNote, int, int]"
"""What a context holds, noted in passing."""

_Outcome: TypeAlias = 'Literal["stop", "length", "timeout"]'


@frozen(eq=False)
class RolloutServices:
    """What every rollout of one task uses."""

    task: str
    controller: InferenceController
    capabilities: Capabilities
    gate: Gate
    outage: Outage
    tokenizer: Tokenizer | None
    workers: Workers
    tool_slots: Slots
    counters: TokenCounters
    instruments: Instruments
    sampling: Sampling
    partial: bool
    limits: Limits
    max_response_tokens: int | None
    max_context: int
    check: Callable[[Sampling, Capabilities], None]
    stop_token_ids: frozenset[int]
    seed: int
    current_task: Callable[[], object]
    newest_version: Callable[[], int]


class RolloutCore:
    """What the contexts of one rollout share.

    Attributes:
        services: What every rollout of the task uses.
        prompt: What is asked.
        uid: The rollout's name.
        contexts: Its contexts, in the order they were opened.
        turns: What the policy was asked for so far.
        asked: For each of the turns, its number among the rollout's calls and what the loop said of it.
        begun: Calls so far: turns, tools, judgers. The next one's number.
        attempts: Requests so far.
        replay: What its loop is given again, if it runs again and that isn't used up.
        finish_reason: Why the loop ended it; `None` if it did not.
        failure: Why the loop failed it; `None` if it did not.
        cut: Whether the budget ended it.
        frozen: Whether its sample was made, or it was given up.
        main: Identity of the task that runs its loop.
        since: When it went back to the loop's own code.
    """

    __slots__ = (
        "asked",
        "attempts",
        "begun",
        "contexts",
        "cut",
        "failure",
        "finish_reason",
        "frozen",
        "main",
        "prompt",
        "replay",
        "services",
        "since",
        "turns",
        "uid",
    )

    def __init__(self, services: RolloutServices, prompt: Prompt, uid: str) -> None:
        self.services: RolloutServices = services
        self.prompt: Prompt = prompt
        self.uid: str = uid
        self.contexts: list[Context] = []
        self.turns: list[Turn] = []
        self.asked: list[tuple[int, Request]] = []
        self.begun: int = 0
        self.attempts: int = 0
        self.replay: Replay | None = None
        self.finish_reason: str | None = None
        self.failure: Failure | None = None
        self.cut: bool = False
        self.frozen: bool = False
        self.main: int | None = None
        self.since: float = services.gate.clock()

    @property
    def ended(self) -> bool:
        """Whether the loop or the budget ended it, or its sample was made."""
        return self.cut or self.frozen or self.finish_reason is not None or self.failure is not None

    def rest(self, now: float, *, judged: bool) -> Wait:
        """What it waits for while it has called nothing."""
        seconds = now - self.since
        if judged:
            return Wait("siblings", seconds, "its siblings, to be judged with them")
        if self.frozen:
            return Wait("judger", seconds, "its judging")
        return Wait("loop", seconds, "its agent loop")

    def open(
        self,
        prompt_ids: Iterable[int],
        messages: Sequence[Message] | None = None,
        tools: Sequence[Message] | None = None,
    ) -> Context:
        """Opens a context; with the messages its prompt was rendered from, if it was."""
        view = memoryview(self.checked(prompt_ids)).toreadonly()
        return self.open_checked(view, messages, tools)

    def open_checked(
        self,
        prompt_ids: memoryview[int],
        messages: Sequence[Message] | None = None,
        tools: Sequence[Message] | None = None,
    ) -> Context:
        """Opens a context of ids that are packed and checked; the view is shared."""
        context = Context(self, prompt_ids, len(self.contexts), messages, tools)
        self.contexts.append(context)
        if self.replay is not None:
            _give_record(context, self.replay.open(prompt_ids))
        return context

    def checked(self, ids: Iterable[int]) -> array[int]:
        """Packs ids that are to go to the policy; `LoopError` if one is outside its vocabulary."""
        column = token_column(ids)
        vocab_size = self.services.capabilities.vocab_size
        if column and max(column) >= vocab_size:
            raise LoopError(f"id {max(column)} is outside the vocabulary of {vocab_size}")
        return column

    def play(self, journal: Journal) -> None:
        """Gives the loop again what a journal holds; before the first context is opened."""
        self.replay = Replay(journal, self.services.counters)
        self.attempts = journal.attempts
        self.begun = journal.next_number

    def go_live(self) -> None:
        """Forgets the journal if it is used up."""
        if self.replay is not None and self.replay.is_over:
            self.replay.end()
            self.replay = None

    def rewind(self) -> None:
        """Takes over what the journal holds and the loop has not asked for again: the rollout is cut once more."""
        replay, self.replay = self.replay, None
        if replay is None:
            return
        for context in self.contexts:
            _take_over(context)
        for recorded in replay.contexts:
            context = Context(self, recorded.prompt_ids, len(self.contexts), None, None)
            self.contexts.append(context)
            _give_record(context, recorded)
            _take_over(context)
        replay.end()

    def tokenizer(self, what: str) -> Tokenizer:
        """The engine's tokenizer; `LoopError` without one."""
        if self.services.tokenizer is None:
            raise LoopError(f"{what} needs the engine to have a tokenizer")
        return self.services.tokenizer


def _give_record(context: Context, record: ContextReplay | None) -> None:
    """Says what a context is given again."""
    context._record = record  # pyright: ignore[reportPrivateUsage]


def _take_over(context: Context) -> None:
    """Has a context take over the turns that it has not been given again."""
    context._take_over()  # pyright: ignore[reportPrivateUsage]


def freeze_context(context: Context, trim: bool) -> Segment:
    """Ends a context; the engine's part, which the handle that loops hold doesn't offer."""
    response = context._response  # pyright: ignore[reportPrivateUsage]
    response = response.without_trailing_context() if trim else response.seal()
    return make_segment(context._prompt_ids, response)  # pyright: ignore[reportPrivateUsage]


def note_context(context: Context) -> LaterContext:
    """What there is of a context now, for a checkpoint; the context goes on.

    Returns:
        What `read_context_note` makes a note of, whenever that is.
    """
    return context._note()  # pyright: ignore[reportPrivateUsage]


def read_context_note(later: LaterContext) -> tuple[ContextNote, int, int]:
    """Makes the note of a context.

    Returns:
        The note, how many tokens are in no turn of it, and how many requests had brought nothing yet.
    """
    if len(later) == 3:
        return later
    return _noted(*later)


def _noted(
    prompt_ids: memoryview[int],
    services: RolloutServices,
    response: Response,
    length: int,
    attempt: _Came | None,
    asked: _Asked | None,
    begun: int,
    tries: int,
) -> tuple[ContextNote, int, int]:
    note = ContextNote(prompt_ids, response, length)
    unseen = 0
    if attempt is not None:
        note.received, note.received_length, reason, _ = attempt
        unseen = int(not note.received_length and reason is None)
    if asked is not None:
        stop = note.length + note.received_length
        note.running = running = RunningTurn(asked, begun, stop, tries)
        if attempt is not None and note.received_length:
            _, _, running.finish_reason, sampling = attempt
            running.min_tokens = sampling.min_tokens
            running.stops = services.stop_token_ids, sampling.stop_token_ids
    return note, 0, unseen


class Context:
    """One unbroken token context of a rollout: prompt ids, then an append-only response."""

    __slots__ = (
        "_asked",
        "_begun",
        "_busy",
        "_core",
        "_failed",
        "_index",
        "_mark",
        "_messages",
        "_outcome",
        "_prompt_ids",
        "_record",
        "_request",
        "_reserved",
        "_response",
        "_running",
        "_since",
        "_tools",
        "_tries",
    )

    def __init__(
        self,
        core: RolloutCore,
        prompt_ids: memoryview[int],
        index: int,
        messages: Sequence[Message] | None,
        tools: Sequence[Message] | None,
    ) -> None:
        self._core = core
        self._prompt_ids = prompt_ids
        self._index = index
        self._response = _NOTHING
        self._messages = None if messages is None else list(messages)
        self._tools = tuple(tools) if tools else None
        self._busy = False
        self._begun = 0  # where the turn that is running began
        self._asked: tuple[int, Request] | None = None  # its number, and what the loop said of it
        self._reserved = 0  # how far the turn that is running may take the response
        self._running: Attempt | None = None
        # Of the attempt: its sampling, where its turn starts, its cap.
        self._request: tuple[Sampling, int, int]
        self._since = 0.0  # when the turn began to wait for the gate, or went through
        self._mark = 0  # requests that had failed in all when the last attempt was sent
        self._tries = 0  # requests of the turn that is running
        self._outcome: _Outcome | None = None  # how it ended, once that is known
        # The last request, if it has failed and may be sent again.
        self._failed: tuple[InferenceError, Attempt] | None = None
        self._record: ContextReplay | None = None  # what it is given again

    @property
    def messages(self) -> tuple[Message, ...] | None:
        """The conversation it holds; `None` if raw ids or text went in, so that nobody can tell."""
        return None if self._messages is None else tuple(self._messages)

    @property
    def tools(self) -> tuple[Message, ...] | None:
        """The tool schemas its prompt was rendered with."""
        return self._tools

    @property
    def busy(self) -> bool:
        """Whether a turn is running."""
        return self._busy

    @property
    def policy_tokens(self) -> int:
        """Tokens that the policy sampled in it so far, those of a running attempt too."""
        running = 0 if self._running is None else len(self._running.received)
        return self._response.policy_tokens + running

    @property
    def oldest_version(self) -> int | None:
        """The lowest weight version among the policy's tokens; `None` without any."""
        return self._response.oldest_version

    @property
    def spoken_for(self) -> int:
        """Response tokens that it has, or that its running turn may still bring."""
        return max(len(self._response), self._reserved)

    @property
    def _promised(self) -> int:
        """`spoken_for`, and what it has not been given again yet."""
        length = self.spoken_for
        return length if self._record is None else max(length, self._record.end)

    @property
    def response(self) -> Response:
        """The columns so far; a copy."""
        return self._response[:]

    @property
    def remaining(self) -> int:
        """Tokens that this context may still take, sampled or appended; >= 0."""
        services = self._core.services
        room = services.max_context - len(self._prompt_ids) - len(self._response)
        if services.max_response_tokens is not None:
            used = sum(context.spoken_for for context in self._core.contexts)
            room = min(room, services.max_response_tokens - used)
        return room if room > 0 else 0

    @property
    def _room(self) -> int:
        """`remaining`, without what other contexts have not been given again yet."""
        core, room = self._core, self.remaining
        if core.replay is None:
            return room
        most = core.services.max_response_tokens
        if most is None:
            return room
        others = sum([context._promised for context in core.contexts if context is not self])
        own = len(self._response)
        return max(0, min(room, most - core.replay.unopened_length - others - own))

    async def generate(
        self, *, sampling: Sampling | None = None, max_tokens: int | None = None
    ) -> Turn:
        """Has the policy continue the context.

        A pause is not seen: the turn keeps its partial, waits, and goes on with what remains of its cap. Where the
        task's strategy says `partial=False` it begins again.
        Without room left the turn ends at once, empty, as `"length"`; asking once more fails the sample.

        Args:
            sampling: For this turn only; `None` is the task's.
            max_tokens: The turn's cap; `None` is the sampling's.

        Returns:
            What was sampled.

        Raises:
            LoopError: Another turn of this context is running, or the rollout is done.
            InferenceError: The server failed.
            DataError: The prompt leaves no room in the context.

        Cancellation: what was received stays in the response.
        """
        core = self._core
        services = core.services
        if self._busy:
            raise LoopError("two generate() at once on one context; open another with segment()")
        if core.ended:
            why = "its budget is used up" if core.cut else "it was finished, failed or frozen"
            raise LoopError(f"generate() on rollout {core.uid}, which has ended: {why}")
        if max_tokens is not None and max_tokens < 1:
            raise LoopError(f"max_tokens must be >= 1, got {max_tokens}")
        if len(self._prompt_ids) >= services.max_context:
            raise DataError(
                f"prompt {core.prompt.uid!r} has {len(self._prompt_ids)} tokens and leaves no room in a "
                f"context of {services.max_context}"
            )
        request = AS_THE_TASK
        if sampling is not None or max_tokens is not None:
            request = Request(sampling, max_tokens)
        if sampling is None:
            sampling = services.sampling
        else:
            services.check(sampling, services.capabilities)
        gate = services.gate
        start = 0 if self._response is _NOTHING else len(self._response)
        cap = min(max_tokens or sampling.max_tokens, self._room)
        self._busy = True
        self._since = gate.clock()
        self._begun = start
        self._reserved = start + cap
        self._tries = 0
        self._outcome = None
        done: Turn | None = None
        try:
            if self._record is not None:
                done = await self._given_again(self._record, request, start)
                if done is not None:
                    return done
            if self._asked is None:
                self._asked = core.begun, request
                core.begun += 1
            seconds = services.limits.turn
            limit = None if seconds is None else Limit(gate, seconds)
            if cap <= 0:
                core.cut = True
                await checkpoint()
            elif not self._tries:
                await self._run_attempt(sampling, start, cap, limit)
            if self._outcome is None:
                await self._go_on(sampling, start, cap, limit)
            done = turn = self._turn(start)
            return turn
        finally:
            asked, self._asked = self._asked, None
            self._busy = False
            core.since = gate.ended()
            self._reserved = 0
            if done is None and (end := len(self._response)) > start:
                # The loop's own timeout, or a failure after a partial: what is in the response is in a turn.
                outcome, tries = self._outcome, max(self._tries, 1)
                done = make_turn(
                    outcome or "abort", None, self._index, start, end, tries, self._response
                )
            if done is not None and asked is not None:
                core.turns.append(done)
                core.asked.append(asked)
                if self._messages is not None:
                    self._messages.append(done.message)

    def append(self, content: str | Iterable[int]) -> None:
        """Appends raw text or ids that the policy did not sample; they are context, never trained.

        What does not fit the budget is cut, and the sample ends as `"length"`.

        Raises:
            LoopError: Text without a tokenizer, or a turn of this context is running.
            ValueError: An id is negative.
        """
        if self._busy:
            raise LoopError("append() while generate() runs on the same context")
        if isinstance(content, str):
            content = self._core.tokenizer("append(text)").encode(content)
        if self._core.frozen:
            raise LoopError(f"append() on rollout {self._core.uid}, whose sample was made")
        ids = self._core.checked(content)
        room = self._room
        if len(ids) > room:
            self._core.cut = True
        if self._response is _NOTHING:
            self._response = Response()
        self._response.append_context(ids[:room])
        self._messages = None  # raw content is no message: chat() can't tell what the context holds

    def append_messages(self, messages: Sequence[Message]) -> Context:
        """Appends chat messages after the policy's turn, by the chat template.

        Returns:
            This context, or a new one with the whole conversation where the template can't continue this one.

        Raises:
            LoopError: A message is the assistant's, there is no tokenizer, or the whole conversation is not known.
        """
        tokenizer = self._core.tokenizer("append_messages()")
        for message in messages:
            if message.get("role") == "assistant":
                raise LoopError("append_messages() takes no assistant messages: those are sampled")
        known = self._messages
        suffix = None
        if self._response.policy_tokens:
            if not self._response.ends_with_policy:
                raise LoopError(
                    "append_messages() follows the policy's turn; give it all messages at once"
                )
            closed = self._response.last_id in self._core.services.stop_token_ids
            suffix = tokenizer.render_suffix(messages, tools=self._tools, closed=closed)
        if suffix is not None:
            self.append(suffix)
            self._messages = None if known is None else [*known, *messages]
            return self
        if known is None:
            raise LoopError(
                "the chat template can't continue this context, and its messages are not known"
            )
        whole = [*known, *messages]
        return self._core.open(tokenizer.render(whole, tools=self._tools), whole, self._tools)

    def wait(self, now: float) -> Wait:
        """What its running turn waits for."""
        gate, attempt = self._core.services.gate, self._running
        if attempt is not None:
            known = f"{len(attempt.received)} of {attempt.max_tokens} tokens, v{attempt.version}"
            return Wait("server", now - self._since, f"the server ({known}, attempt {attempt.id})")
        return gate.wait(now - self._since)

    def snapshot(self, *, trim: bool) -> Segment:
        """What is there now, without a turn that is still running; the context goes on."""
        response = self._response[: self._begun] if self._busy else self._response[:]
        if trim:
            response = response.without_trailing_context()
        return Segment(self._prompt_ids, response)

    def _note(self) -> LaterContext:
        """What there is now; see `note_context`. Made for each turn in flight in one step, so it is a bare tuple."""
        attempt, response, running = self._running, self._response, None
        services = self._core.services
        if attempt is not None:
            if not services.partial:
                return self._note_at_once()
            received = attempt.received
            running = received, len(received), attempt.finish_reason, self._request[0]
        if self._record is not None:
            return self._note_at_once()
        return (
            self._prompt_ids,
            services,
            response,
            len(response),
            running,
            self._asked,
            self._begun,
            self._tries,
        )

    def _note_at_once(self) -> tuple[ContextNote, int, int]:
        record, attempt, response = self._record, self._running, self._response
        note = ContextNote(self._prompt_ids, response, len(response))
        discarded = unseen = 0
        if attempt is not None:
            note.received = received = attempt.received
            note.received_length = length = len(received)
            if not length:
                unseen = int(attempt.finish_reason is None)
            elif not self._core.services.partial and self._is_partial(attempt, self._request[0]):
                discarded, note.received_length = length, 0
        if self._asked is not None:
            stop = note.length + note.received_length
            note.running = running = RunningTurn(self._asked, self._begun, stop, self._tries)
            if attempt is not None and note.received_length:
                sampling = self._request[0]
                running.finish_reason = attempt.finish_reason
                running.min_tokens = sampling.min_tokens
                running.stops = self._core.services.stop_token_ids, sampling.stop_token_ids
        if record is not None and record.turns:
            if not note.received_length and not record.is_left_by(response):
                # As in `_take_over`: what is there is the beginning of the record.
                note.response, note.length = record.response, record.end
                note.recorded = tuple(record.turns)
            else:
                discarded += record.pending_tokens
        return note, discarded, unseen

    def _take_over(self) -> None:
        """Takes over the turns that it has not been given again."""
        record, self._record = self._record, None
        if record is None or not record.turns:
            return
        # What is there is the beginning of the record, and perhaps context that no turn has followed.
        self._response = record.response[: record.end]
        for recorded in record.turns:
            self._core.turns.append(self._recorded(recorded.turn))
            self._core.asked.append((recorded.begun, recorded.request))

    def _recorded(self, turn: Turn) -> Turn:
        return evolve(turn, segment=self._index, response=self._response)

    def _give_again(self, turn: Turn) -> Turn:
        """Takes a whole turn from the record."""
        assert self._record is not None
        services = self._core.services
        self._extend(self._record.response[turn.start : turn.stop])
        services.counters.replayed_turns += 1
        if turn.text is None and services.tokenizer is not None:
            # It was cut when it had ended, and before it was decoded.
            ids = self._response[turn.start :].ids.tolist()
            turn = evolve(turn, text=services.tokenizer.decode(ids))
        return self._recorded(turn)

    def _extend(self, part: Response) -> None:
        if self._response is _NOTHING:
            self._response = Response()
        self._response.extend(part)

    async def _given_again(
        self, record: ContextReplay, request: Request, start: int
    ) -> Turn | None:
        """Takes the next turn from the record; `None` if it goes on from there, or is not in it."""
        await checkpoint()
        services = self._core.services
        recorded = record.next_turn(self._response, request)
        if recorded is None:
            self._record = None
            self._core.go_live()
            return None
        self._asked = recorded.begun, request
        if recorded.turn.finish_reason != "abort":
            return self._give_again(recorded.turn)
        if services.partial:
            self._extend(record.response[start : recorded.turn.stop])
        else:
            record.discard(recorded)
            services.counters.restarted_turns += 1
        self._tries = recorded.turn.attempts
        return None

    def _turn(self, start: int) -> Turn:
        """Makes the turn that has ended.

        Raises:
            InferenceError: It has no token, though the policy was asked.
        """
        response, outcome = self._response, self._outcome
        assert outcome is not None
        stop = len(response)
        if stop == start and self._tries:
            raise InferenceError("the server's answer is unusable: it ended without a single token")
        text: str | None = None
        tokenizer = self._core.services.tokenizer
        if tokenizer is not None:
            text = tokenizer.decode(response.packed_ids[start:].tolist())
        return make_turn(outcome, text, self._index, start, stop, self._tries, response)

    async def _go_on(self, sampling: Sampling, start: int, cap: int, limit: Limit | None) -> None:
        """Sends requests until the turn has ended: one was cut, or failed, or was before its loop ran again."""
        services = self._core.services
        retries: Retries | None = None
        resumed = False
        stop = start
        while self._outcome is None:
            failed, self._failed = self._failed, None
            self._since = services.gate.clock()
            if failed is not None:
                error, attempt = failed
                gained = len(self._response) > stop
                if retries is None:
                    retries = Retries(services.outage, f"{services.task}/{self._core.prompt.uid}")
                await retries.again(error, attempt, gained=gained)
                services.counters.retries += 1
                # Its prompt copies the context: not to be held at the gate.
                del failed, error, attempt
                self._since = services.gate.clock()
            elif len(self._response) > stop:
                retries = None
            stop = len(self._response)
            if stop - start >= cap:
                self._outcome = "length"
                break
            resumed = resumed or stop > start
            await self._run_attempt(sampling, start, cap - (stop - start), limit)
        if resumed:
            services.counters.resumed_turns += 1

    async def _run_attempt(
        self, sampling: Sampling, start: int, cap: int, limit: Limit | None
    ) -> None:
        """Runs one request and keeps what it brought; `_outcome` is set if the turn has ended with it.

        A request whose answer is unusable leaves the response as it was. One that is aborted or cancelled, or that
        fails for a reason that may pass, keeps its partial: that was checked when it came. One that may be sent again
        is in `_failed`.
        """
        services = self._core.services
        gate, outage = services.gate, services.outage
        self._request = sampling, start, cap
        epoch, had = gate.epoch, 0 if self._response is _NOTHING else len(self._response)
        if gate.shut or not gate.slots.take():
            await gate.enter(goes_on=self._tries > 0)
            self._since = gate.clock()
        usable = True
        failure: InferenceError | None = None
        timed_out = False
        try:
            self._running = running = self._make_attempt()
            scope = gate.begin(running)
            services.instruments.tell("turn_started", running)
            if limit is None:
                with scope:
                    await services.controller.generate(running)
            else:  # waiting cost the turn nothing
                with limit, scope:
                    await services.controller.generate(running)
            if running.finish_reason is None and not scope.cancel_called:
                raise InferenceError("the controller returned without finishing the attempt")
            if not services.partial and self._is_partial(running, sampling):
                usable = False
                services.counters.restarted_turns += 1
        except OverLimit:
            attempt = self._running
            got = len(self._response) + (0 if attempt is None else len(attempt.received))
            usable = timed_out = services.limits.on_timeout == "finish" and got > start
            if not timed_out:
                raise InferenceError(f"the turn took over {services.limits.turn} s") from None
        except Exception as error:
            failure, attempt = self._failure(error), self._running
            usable = failure.retryable and attempt is not None and bool(attempt.received)
            if usable and not services.partial:
                usable = False
                services.counters.restarted_turns += 1
            if not failure.retryable:
                if isinstance(error, InferenceError | UnsupportedSampling):
                    raise
                raise failure from error
        except BaseException as error:
            if is_stray(error, in_loop=True):
                usable = False
                raise InferenceError("the controller cancelled the request itself") from error
            raise
        finally:
            attempt, self._running = self._running, None
            gate.end(attempt)
            if attempt is not None:
                stopped = self._keep(attempt, sampling, start, usable)
                if usable:
                    self._outcome = "stop" if stopped else self._reason(attempt, sampling, start)
                    if timed_out and self._outcome is None:
                        self._outcome = "timeout"
                services.instruments.tell("turn_ended", attempt)
        assert attempt is not None
        if len(self._response) > had:
            outage.good = attempt
            if outage.failures and failure is None:
                outage.worked(self._mark)
        elif failure is None and self._outcome is None:
            failure = InferenceError("the server aborted unasked and without a token to keep")
        if failure is not None and self._outcome is None:
            if gate.closed or gate.epoch != epoch:
                return  # whatever it says, it was asked to stop
            self._failed = failure, attempt

    def _make_attempt(self) -> Attempt:
        """Makes the next attempt of the turn, once it may pass the gate."""
        core = self._core
        services = core.services
        gate = services.gate
        sampling, start, cap = self._request
        core.attempts = number = core.attempts + 1
        if sampling.seed is not None or sampling.min_tokens:
            sampling = self._of_attempt(sampling, start, cap, number)
        prompt_ids = self._prompt_ids
        if self._response is not _NOTHING:
            whole = array("i", prompt_ids.tobytes())
            whole.extend(self._response.packed_ids)
            prompt_ids = memoryview(whole).toreadonly()
        self._tries += 1
        self._mark = services.outage.failures
        return Attempt(
            prompt_ids,
            max_tokens=cap,
            sampling=sampling,
            affinity=core.uid,
            version=gate.version,
            vocab_size=services.capabilities.vocab_size,
            counters=services.counters,
            newest_version=services.newest_version,
        )

    def _of_attempt(self, sampling: Sampling, start: int, cap: int, number: int) -> Sampling:
        """The sampling of one attempt: with a seed of its own, and what remains of `min_tokens`."""
        services = self._core.services
        if sampling.seed is not None:
            base = services.seed if sampling.seed == "derived" else sampling.seed
            sampling = evolve(sampling, seed=attempt_seed(base, self._core.uid, number))
        if sampling.min_tokens:
            got = len(self._response) - start
            least = min(max(0, sampling.min_tokens - got), cap)
            sampling = evolve(sampling, min_tokens=least)
        return sampling

    def _failure(self, error: Exception) -> InferenceError:
        """What a request failed with, as the controller's error."""
        if isinstance(error, InferenceError):
            return error
        message = f"the controller raised {describe(error)}"
        return InferenceError(message, retryable=isinstance(error, ConnectionError))

    def _keep(self, attempt: Attempt, sampling: Sampling, start: int, usable: bool) -> bool:
        """Moves what an attempt received into the response; synchronous, so no cancellation can lose it."""
        counters = self._core.services.counters
        received = attempt.received
        if not usable or self._core.frozen:
            counters.discarded += len(received)
            return False
        if attempt.finish_reason is None and not received:
            counters.unseen_turns += 1
        stop_at = None
        tokenizer = self._core.services.tokenizer
        if sampling.stop and tokenizer is not None and len(self._response) > start:
            # The server saw the partial as its prompt, so a stop string across the seam is ours to find.
            whole = [*self._response[start:].ids, *received.ids]
            seam = len(self._response) - start
            try:
                stop_at = tokens_through_stop(whole, seam, sampling.stop, tokenizer.decode)
            except Exception:
                # The tokens are kept first; the turn's end decodes them again, and raises.
                stop_at = None
            if stop_at is not None:
                counters.discarded += len(whole) - stop_at
                received = received[: stop_at - seam]
        if self._response is _NOTHING and stop_at is None:
            self._response = received  # the attempt is over: nothing else changes it
        else:
            self._response.extend(received)
        if self._record is not None and received:
            self._record.leave()  # a turn that the loop had cut has gone on
        return stop_at is not None

    def _is_partial(self, attempt: Attempt, sampling: Sampling) -> bool:
        """Whether an attempt that brings a whole turn was cut in the middle of it."""
        received = attempt.received
        if attempt.finish_reason not in (None, FinishReason.ABORT) or not received:
            return False
        if len(received) >= attempt.max_tokens:
            return False
        if len(received) < sampling.min_tokens:
            return True
        return not self._stops(sampling, received.last_id)

    def _reason(
        self, attempt: Attempt, sampling: Sampling, start: int
    ) -> Literal["stop", "length"] | None:
        """Why the turn has ended; `None` if it goes on from a partial."""
        reason = attempt.finish_reason
        if reason is _STOP:
            return "stop"
        if reason is _LENGTH:
            return "length"
        got = len(self._response) - start
        if not got or got < sampling.min_tokens:
            return None
        return "stop" if self._stops(sampling, self._response.last_id) else None

    def _stops(self, sampling: Sampling, token: int | None) -> bool:
        """Whether a token ends a turn."""
        return token in self._core.services.stop_token_ids or token in sampling.stop_token_ids

    def __repr__(self) -> str:
        return f"<Context {self._index} of {self._core.uid}: {len(self._prompt_ids)} prompt tokens, {self._response!r}>"
