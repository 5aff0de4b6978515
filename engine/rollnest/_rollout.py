"""The live handle that an agent loop works with, and its token contexts.

A loop never sees a pause: `generate` simply returns later. Ids that went to the policy are never decoded and
encoded again (I4): what is sent for a turn is the context's prompt ids and everything after them. Budgets are
always derived from what is there, never stored (I5).
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import isawaitable, iscoroutinefunction
from random import Random
from typing import Literal, TypeVar, TypeVarTuple, cast

from anyio import current_time
from anyio.lowlevel import checkpoint
from attrs import evolve, frozen

from ._attempt import Attempt, FinishReason, TokenCounters
from ._continuation import attempt_seed, check_sampling, tokens_through_stop
from ._gate import Gate
from ._instruments import Instruments
from ._options import Limits, Sampling
from ._records import Failure, Message, Prompt, Sample, Segment, Status, Turn
from ._response import Response, token_column
from ._slots import Slots
from ._workers import Workers
from .abc import InferenceController, Tokenizer
from .errors import DataError, InferenceError, LoopError, ToolError, UnsupportedSampling

__all__ = ["Context", "Rollout", "RolloutServices"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# A server that ends turns unasked and without a token would be asked again at once, for ever.
_EMPTY_ABORTS = 3


@frozen(eq=False)
class RolloutServices:
    """What every rollout of one task uses."""

    task: str
    controller: InferenceController
    gate: Gate
    tokenizer: Tokenizer | None
    workers: Workers
    tool_slots: Slots
    counters: TokenCounters
    instruments: Instruments
    sampling: Sampling
    limits: Limits
    max_response_tokens: int | None
    max_context: int
    stop_token_ids: frozenset[int]
    seed: int


class Rollout:
    """One sample in the making.

    Made by the engine; an agent loop gets it, generates and appends, and returns. The sample is frozen then.
    """

    def __init__(
        self,
        services: RolloutServices,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        *,
        visit: int,
        index: int,
    ) -> None:
        self._services = services
        self._prompt = prompt
        self._visit = visit
        self._index = index
        self._turns: list[Turn] = []
        self._finish_reason: str | None = None
        self._failure: Failure | None = None
        self._cut = False
        self._started = current_time()
        self._contexts: list[Context] = []
        self._attempts = 0
        self._current = self.segment(prompt_ids)
        self._current._messages = list(prompt.messages) if prompt.messages else None
        self._random: Random | None = None

    # What a loop may look at

    @property
    def prompt(self) -> Prompt:
        """What is asked."""
        return self._prompt

    @property
    def index(self) -> int:
        """Its place in the group."""
        return self._index

    @property
    def uid(self) -> str:
        """Its name: task, prompt, visit and index."""
        return f"{self._services.task}/{self._prompt.uid}/{self._visit}/{self._index}"

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What `generate` brought so far."""
        return tuple(self._turns)

    @property
    def response(self) -> Response:
        """The current context's columns so far; a copy."""
        return self._current.response

    @property
    def remaining(self) -> int:
        """Tokens that the current context may still take, sampled or appended."""
        return self._current.remaining

    @property
    def done(self) -> bool:
        """Whether nothing more can be generated: it was finished or failed, or the budget is used up."""
        return (
            self._finish_reason is not None
            or self._failure is not None
            or self._cut
            or self.remaining <= 0
        )

    @property
    def random(self) -> Random:
        """A random generator of this rollout's own, seeded by the engine's seed, the visit and the index."""
        if self._random is None:
            self._random = Random(f"{self._services.seed}/{self.uid}")
        return self._random

    # What a loop may do

    async def generate(
        self, *, sampling: Sampling | None = None, max_tokens: int | None = None
    ) -> Turn:
        """Has the policy continue the current context; see `Context.generate`."""
        return await self._current.generate(sampling=sampling, max_tokens=max_tokens)

    def append(self, content: str | Iterable[int]) -> None:
        """Appends raw text or ids to the current context; see `Context.append`."""
        self._current.append(content)

    def append_messages(self, messages: Sequence[Message]) -> None:
        """Appends chat messages after the policy's turn, by the chat template.

        Where the template can't continue (it rewrites what came before), the whole conversation is rendered into a
        new context, which becomes the current one.

        Raises:
            LoopError: A message is the assistant's, or there is no tokenizer.
        """
        self._current = self._current.append_messages(messages)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
    ) -> Turn:
        """Has the policy answer a whole conversation, like a chat API.

        It attaches to the context that holds the longest beginning of `messages`, so that the policy's earlier ids
        are sent as they were sampled; without one it starts a new context. The answer's message is `turn.message`.

        Raises:
            LoopError: There is no tokenizer, or the last message is the assistant's.

        Cancellation: like `generate`.
        """
        context = self._branch(messages, tools)
        if context is None:
            tokenizer = self._tokenizer("chat")
            context = self.segment(tokenizer.render(messages, tools=tools))
            context._messages = list(messages)
            context._tools = None if tools is None else tuple(tools)
        self._current = context
        return await context.generate(sampling=sampling, max_tokens=max_tokens)

    async def tool(self, function: Callable[[*Ts], T | Awaitable[T]], *args: *Ts) -> T:
        """Calls a tool under the task's limit and the engine's capacity; a sync one in a worker thread.

        Raises:
            ToolError: It raised, or ran out of time.

        Cancellation: an async tool is cancelled; a sync one's thread is abandoned.
        """
        services = self._services
        name = getattr(function, "__name__", repr(function))
        try:
            if iscoroutinefunction(function):
                async with services.tool_slots:
                    with services.gate.limit(services.limits.tool):
                        return cast("T", await function(*args))
            with services.gate.limit(services.limits.tool):
                answer = await services.workers.run(
                    f"tool {name} of {self.uid}", services.tool_slots, function, *args
                )
                return cast("T", await answer if isawaitable(answer) else answer)
        except TimeoutError as error:
            raise ToolError(f"tool {name} took over {services.limits.tool} s") from error
        except Exception as error:
            raise ToolError(f"tool {name} raised {type(error).__name__}: {error}") from error

    def segment(self, ids: Iterable[int]) -> Context:
        """Opens another token context, with a prompt of its own.

        Contexts may generate side by side, so sub-agents can work at once; all count against
        `max_response_tokens`.
        """
        context = Context(self, token_column(ids), index=len(self._contexts))
        self._contexts.append(context)
        return context

    def finish(self, reason: str) -> None:
        """Ends the sample as completed, for this reason. The loop should return then."""
        self._finish_reason = reason

    def fail(self, reason: str) -> None:
        """Ends the sample as failed, for this reason. The loop should return then."""
        self._failure = Failure("loop", reason)

    def __repr__(self) -> str:
        state = "done" if self.done else f"{self.remaining} tokens left"
        return f"<Rollout {self.uid}: {len(self._turns)} turns, {state}>"

    # What the engine does with it

    @property
    def policy_tokens(self) -> int:
        """Tokens recorded so far."""
        return sum(context._response.policy_tokens for context in self._contexts)

    def freeze(self, status: Status, failure: Failure | None = None) -> Sample:
        """Ends the rollout; its responses are sealed.

        Args:
            status: `COMPLETED` if the loop returned; what it did itself (`fail`, nothing generated) comes first.
            failure: Why, if `status` is `FAILED`.
        """
        reason = self._finish_reason
        if self._cut:
            reason = "length"
        elif reason is None and self._turns:
            reason = self._turns[-1].finish_reason
        if status is Status.COMPLETED:
            failure = self._failure
            if failure is None and not self.policy_tokens:
                failure = Failure("loop", "the loop returned without generating a token")
            status = Status.FAILED if failure else Status.COMPLETED
        return Sample(
            task=self._services.task,
            prompt=self._prompt,
            visit=self._visit,
            index=self._index,
            status=status,
            segments=tuple(context.freeze(trim=self._cut) for context in self._contexts),
            turns=tuple(self._turns),
            finish_reason=reason,
            failure=failure,
            sampling=self._services.sampling,
            logprobs_mode=self._services.controller.capabilities.logprobs,
            generate_seconds=current_time() - self._started,
        )

    def _tokenizer(self, what: str) -> Tokenizer:
        if self._services.tokenizer is None:
            raise LoopError(f"{what} needs the engine to have a tokenizer")
        return self._services.tokenizer

    def _branch(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> Context | None:
        """The context that holds the longest beginning of a conversation, with the rest appended."""
        for context in sorted(self._contexts, key=lambda c: -len(c._messages or ())):
            known = context._messages
            if known is None or (tools or None) != (context._tools or None):
                continue
            if len(known) <= len(messages) and all(map(_same, known, messages)):
                rest = messages[len(known) :]
                if not rest:
                    if not context._response.policy_tokens:
                        return context
                    continue
                if context._busy or any(m["role"] == "assistant" for m in rest):
                    continue
                return context.append_messages(rest)
        return None


def _same(one: Message, other: Message) -> bool:
    """Whether two chat messages say the same; keys without a value don't count."""
    return _said(one) == _said(other)


def _said(message: Message) -> Mapping[str, object]:
    return {key: value for key, value in message.items() if value is not None}


class Context:
    """One unbroken token context of a rollout: prompt ids, then an append-only response."""

    def __init__(self, rollout: Rollout, prompt_ids: array[int], *, index: int) -> None:
        self._rollout = rollout
        self._prompt_ids = prompt_ids
        self._index = index
        self._response = Response()
        self._messages: list[Message] | None = None
        self._tools = rollout.prompt.tools
        self._busy = False

    @property
    def response(self) -> Response:
        """The columns so far; a copy."""
        return self._response[:]

    @property
    def remaining(self) -> int:
        """Tokens that this context may still take, sampled or appended; >= 0."""
        services = self._rollout._services
        room = services.max_context - len(self._prompt_ids) - len(self._response)
        if services.max_response_tokens is not None:
            used = sum(len(context._response) for context in self._rollout._contexts)
            room = min(room, services.max_response_tokens - used)
        return max(0, room)

    async def generate(
        self, *, sampling: Sampling | None = None, max_tokens: int | None = None
    ) -> Turn:
        """Has the policy continue the context.

        A pause is not seen: the turn keeps its partial, waits, and goes on with what remains of its cap.
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
        rollout = self._rollout
        if self._busy:
            raise LoopError("two generate() at once on one context; open another with segment()")
        if rollout._cut or rollout._finish_reason is not None or rollout._failure is not None:
            raise LoopError(f"generate() on a rollout that has ended: {rollout!r}")
        if max_tokens is not None and max_tokens < 1:
            raise LoopError(f"max_tokens must be >= 1, got {max_tokens}")
        if len(self._prompt_ids) >= rollout._services.max_context:
            raise DataError(
                f"prompt {rollout.prompt.uid!r} has {len(self._prompt_ids)} tokens and leaves no room in a "
                f"context of {rollout._services.max_context}"
            )
        if sampling is None:
            sampling = rollout._services.sampling
        else:
            check_sampling(sampling, rollout._services.controller.capabilities)
        self._busy = True
        try:
            turn = await self._run_turn(sampling, max_tokens or sampling.max_tokens)
        finally:
            self._busy = False
        rollout._turns.append(turn)
        if self._messages is not None:
            self._messages.append(turn.message)
        return turn

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
            content = self._rollout._tokenizer("append(text)").encode(content)
        ids = token_column(content)
        room = self.remaining
        if len(ids) > room:
            self._rollout._cut = True
        self._response.append_context(ids[:room])
        self._messages = None  # raw content is no message: chat() can't tell what the context holds

    def append_messages(self, messages: Sequence[Message]) -> Context:
        """Appends chat messages after the policy's turn, by the chat template.

        Returns:
            This context, or a new one with the whole conversation where the template can't continue this one.

        Raises:
            LoopError: A message is the assistant's, there is no tokenizer, or the whole conversation is not known.
        """
        tokenizer = self._rollout._tokenizer("append_messages()")
        for message in messages:
            if message.get("role") == "assistant":
                raise LoopError("append_messages() takes no assistant messages: those are sampled")
        known = self._messages
        suffix = None
        if self._response.policy_tokens:
            closed = self._response.last_id in self._rollout._services.stop_token_ids
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
        fresh = self._rollout.segment(tokenizer.render(whole, tools=self._tools))
        fresh._messages = whole
        fresh._tools = self._tools
        return fresh

    def freeze(self, *, trim: bool) -> Segment:
        """Ends the context."""
        response = self._response.without_trailing_context() if trim else self._response.seal()
        return Segment(memoryview(self._prompt_ids).toreadonly(), response)

    async def _run_turn(self, sampling: Sampling, max_tokens: int) -> Turn:
        services = self._rollout._services
        start = len(self._response)
        cap = min(max_tokens, self.remaining)
        limit = services.gate.limit(services.limits.turn)
        reason: Literal["stop", "length"] | None = None
        attempts = empty = 0
        if cap <= 0:
            self._rollout._cut = True
            await checkpoint()
        while reason is None:
            got = len(self._response) - start
            if got >= cap:
                reason = "length"
                break
            epoch = services.gate.epoch
            attempt, stopped = await self._run_attempt(sampling, start, cap - got, limit)
            attempts += 1
            reason = "stop" if stopped else self._reason(attempt, sampling, start)
            if reason is None and not attempt.received:
                asked = services.gate.closed or services.gate.epoch != epoch
                empty = 0 if asked else empty + 1
                if empty >= _EMPTY_ABORTS:
                    raise InferenceError(
                        f"the server aborted {empty} times unasked and without a token",
                        retryable=True,
                    )
        if attempts and start == len(self._response):
            raise InferenceError("the server's answer is unusable: it ended without a single token")
        if attempts > 1:
            services.counters.resumed_turns += 1
        ids = self._response[start:].ids
        return Turn(
            reason,
            None if services.tokenizer is None else services.tokenizer.decode(ids.tolist()),
            self._index,
            start,
            len(self._response),
            attempts,
            self._response,
        )

    async def _run_attempt(
        self, sampling: Sampling, start: int, cap: int, limit: AbstractContextManager[None]
    ) -> tuple[Attempt, bool]:
        """Runs one request and keeps what it brought.

        A request that fails leaves the response as it was. One that is aborted or cancelled keeps its partial.

        Returns:
            The attempt, and whether its tokens completed a stop string across the seam of two attempts.
        """
        rollout, services = self._rollout, self._rollout._services
        rollout._attempts += 1
        number = rollout._attempts
        attempt: Attempt | None = None
        usable = stopped = False

        def build() -> Attempt:
            nonlocal attempt, usable
            attempt = self._attempt(sampling, start, cap, number)
            usable = True
            services.instruments.tell("turn_started", attempt)
            return attempt

        try:
            done = await services.gate.pass_through(build, services.controller.generate, limit)
        except Exception as error:
            usable = False
            if isinstance(error, InferenceError | UnsupportedSampling):
                raise
            if isinstance(error, TimeoutError):
                message = f"the turn took over {services.limits.turn} s"
            else:
                message = f"the controller raised {type(error).__name__}: {error}"
            raise InferenceError(message) from error
        finally:
            if attempt is not None:
                stopped = self._keep(attempt, sampling, start, usable)
                services.instruments.tell("turn_ended", attempt)
        return done, stopped

    def _attempt(self, sampling: Sampling, start: int, cap: int, number: int) -> Attempt:
        services = self._rollout._services
        if sampling.seed is not None:
            base = services.seed if sampling.seed == "derived" else sampling.seed
            sampling = evolve(sampling, seed=attempt_seed(base, self._rollout.uid, number))
        if sampling.min_tokens:
            got = len(self._response) - start
            sampling = evolve(sampling, min_tokens=max(0, sampling.min_tokens - got))
        return Attempt(
            memoryview(self._prompt_ids + self._response.packed_ids).toreadonly(),
            max_tokens=cap,
            sampling=sampling,
            affinity=self._rollout.uid,
            version=services.gate.version,
            vocab_size=services.controller.capabilities.vocab_size,
            counters=services.counters,
        )

    def _keep(self, attempt: Attempt, sampling: Sampling, start: int, usable: bool) -> bool:
        """Moves what an attempt received into the response; synchronous, so no cancellation can lose it."""
        counters = self._rollout._services.counters
        received = attempt.received
        if not usable:
            counters.discarded += len(received)
            return False
        if attempt.finish_reason is None and not received:
            counters.unseen_turns += 1
        stop_at = None
        tokenizer = self._rollout._services.tokenizer
        if sampling.stop and tokenizer is not None and len(self._response) > start:
            # The server saw the partial as its prompt, so a stop string across the seam is ours to find.
            whole = [*self._response[start:].ids, *received.ids]
            seam = len(self._response) - start
            stop_at = tokens_through_stop(whole, seam, sampling.stop, tokenizer.decode)
            if stop_at is not None:
                counters.discarded += len(whole) - stop_at
                received = received[: stop_at - seam]
        self._response.extend(received)
        return stop_at is not None

    def _reason(
        self, attempt: Attempt, sampling: Sampling, start: int
    ) -> Literal["stop", "length"] | None:
        """Why the turn has ended; `None` if it goes on from a partial."""
        match attempt.finish_reason:
            case FinishReason.STOP:
                return "stop"
            case FinishReason.LENGTH:
                return "length"
            case _:
                got = len(self._response) - start
                if not got or got < sampling.min_tokens:
                    return None
                stops = self._rollout._services.stop_token_ids.union(sampling.stop_token_ids)
                return "stop" if self._response.last_id in stops else None
