"""The live handle that an agent loop works with.

A loop never sees a pause: `generate` simply returns later. What a rollout holds can only grow, and is frozen
when the loop returns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from inspect import iscoroutinefunction
from random import Random
from typing import Any, TypeVar, TypeVarTuple, cast, overload

from anyio.lowlevel import checkpoint

from ._capture import ContextNote, RolloutNote, within
from ._codecs import Plain, decode, encode, fingerprint, same, unrecordable_return
from ._context import (
    Context,
    LaterContext,
    RolloutCore,
    RolloutServices,
    freeze_context,
    note_context,
    read_context_note,
)
from ._gate import OverLimit
from ._journal import (
    MAIN,
    CallKind,
    CallLog,
    Journal,
    Judged,
    OnUnknown,
    Outcome,
    Raised,
    RecordedCall,
    Replay,
    Returned,
    ToolReplay,
    check_tool_options,
)
from ._judging import GroupJudging, as_score
from ._making import make_sample
from ._options import Sampling
from ._records import Failure, Message, Prompt, Sample, Segment, Status, Turn, Verdict
from ._response import Response
from ._slots import Call
from ._stray import is_stray
from ._tree import SampleTree
from .errors import JudgeError, LoopError, RollnestError, ToolError, describe

__all__ = [
    "Rollout",
    "begin_loop",
    "freeze_rollout",
    "give_up_rollout",
    "in_tool",
    "later_journal",
    "must_restart",
    "note_rollout",
    "rollout_journal",
    "tool_identity",
    "tool_key",
]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_tool_key: ContextVar[str] = ContextVar("rollnest_tool_key")

_caller: ContextVar[tuple[int, CallLog, int]] = ContextVar("rollnest_caller")
"""The task that has made a call, of which rollout, and its strand there. A child task inherits it, but is another one;
and no task can have the identity of its parent, as it may have that of one that ended.
"""


def tool_key() -> str:
    """Returns the key of the tool call that runs now: the rollout's uid and the call's number.

    The key is the same when the call runs again because its rollout was cut in the middle of it. Hand it to a service
    that does things once per key, and the call takes effect once.

    Raises:
        LoopError: No tool runs here.
    """
    try:
        return _tool_key.get()
    except LookupError:
        raise LoopError("tool_key() outside of a tool that rollout.tool() called") from None


@contextmanager
def in_tool(key: str) -> Generator[None]:
    """Says what `tool_key()` returns in the block."""
    token = _tool_key.set(key)
    try:
        yield
    finally:
        _tool_key.reset(token)


def freeze_rollout(rollout: Rollout, status: Status, failure: Failure | None = None) -> Sample:
    """Ends a rollout and seals its responses; the engine's part, which the handle that loops hold doesn't offer.

    Args:
        rollout: The rollout.
        status: `COMPLETED` if the loop returned; what it did itself (`fail`, nothing generated) comes first.
        failure: Why, if `status` is `FAILED`.
    """
    return rollout._freeze(status, failure)  # pyright: ignore[reportPrivateUsage]


def rollout_journal(rollout: Rollout, aborted: Sample) -> Journal | None:
    """What a rollout leaves behind for its loop to run again; `None` if that is nothing.

    Args:
        rollout: The rollout, frozen.
        aborted: Its sample: it was cut.
    """
    return rollout._journal(aborted)  # pyright: ignore[reportPrivateUsage]


def later_journal(rollout: Rollout, sample: Sample) -> Callable[[], Journal | None]:
    """What makes the journal of a rollout that has ended, whenever it is called.

    Args:
        rollout: The rollout, frozen.
        sample: Its sample.
    """
    return rollout._later_journal(sample)  # pyright: ignore[reportPrivateUsage]


def note_rollout(rollout: Rollout, now: float) -> Callable[[], RolloutNote]:
    """What there is of a rollout now, for a checkpoint; the rollout goes on.

    Args:
        rollout: The rollout, not frozen.
        now: The event loop's time.

    Returns:
        What makes the note, whenever it is called.
    """
    return rollout._note(now)  # pyright: ignore[reportPrivateUsage]


def begin_loop(rollout: Rollout) -> None:
    """Says that the running task is the one that runs the rollout's loop."""
    core = rollout._core  # pyright: ignore[reportPrivateUsage]
    core.main = id(core.services.current_task())


def must_restart(rollout: Rollout) -> bool:
    """Whether a tool did not do the same again, so that nothing of the rollout's record holds."""
    return rollout._must_restart  # pyright: ignore[reportPrivateUsage]


def give_up_rollout(rollout: Rollout) -> None:
    """Ends a rollout without a sample; another one begins anew in its place."""
    rollout._give_up()  # pyright: ignore[reportPrivateUsage]


class Rollout:
    """One sample in the making.

    Made by the engine; an agent loop gets it, generates and appends, and returns. The sample is frozen then.
    """

    __slots__ = (
        "_core",
        "_current",
        "_frozen",
        "_index",
        "_judged",
        "_judging",
        "_log",
        "_must_restart",
        "_place",
        "_random",
        "_scored",
        "_seed",
        "_started",
        "_visit",
    )

    def __init__(
        self,
        services: RolloutServices,
        prompt: Prompt,
        prompt_ids: memoryview[int],
        visit: int,
        index: int,
        place: int = 0,
        tools: Sequence[Message] | None = None,
        judging: GroupJudging | None = None,
        journal: Journal | None = None,
    ) -> None:
        uid = f"{services.task}/{prompt.uid}/{visit}/{index}"
        if place:  # a fresh one in the place of another, with seeds of its own
            uid = f"{uid}.{place}"
        self._core = core = self._make_core(services, prompt, uid)
        self._visit = visit
        self._index = index
        self._place = place
        self._started = core.since
        self._seed = services.seed
        self._log: CallLog | None = None
        self._must_restart = False
        if journal is not None:
            self._seed = journal.seed
            self._log = CallLog(journal)
            core.play(journal)
        self._current = core.open_checked(prompt_ids, prompt.messages, tools)
        self._frozen: tuple[Segment, ...] | None = None  # once its sample was made
        self._random: Random | None = None
        self._judging = judging
        self._scored: Verdict | None = None
        self._judged: tuple[Verdict, int] | None = None  # with how many turns the judger saw

    def _make_core(self, services: RolloutServices, prompt: Prompt, uid: str) -> RolloutCore:
        return RolloutCore(services, prompt, uid)

    # What a loop may look at

    @property
    def prompt(self) -> Prompt:
        """What is asked."""
        return self._core.prompt

    @property
    def index(self) -> int:
        """Its place in the group."""
        return self._index

    @property
    def uid(self) -> str:
        """Its name: task, prompt, visit and index, with `.1` for the first that took another's place, and so on."""
        return self._core.uid

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What `generate` brought so far."""
        return tuple(self._core.turns)

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
        return self._core.ended or self.remaining <= 0

    @property
    def busy(self) -> bool:
        """Whether a turn is running."""
        return any(context.busy for context in self._core.contexts)

    @property
    def random(self) -> Random:
        """A random generator of this rollout's own, seeded by the engine's seed, the visit and the index."""
        if self._random is None:
            self._random = Random(f"{self._seed}/{self.uid}")
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
        if not messages or messages[-1].get("role") == "assistant":
            raise LoopError("chat() needs a conversation that does not end with the assistant")
        context = self._branch(messages, tools)
        if context is None:
            ids = self._core.tokenizer("chat()").render(messages, tools=tools)
            context = self._core.open(ids, messages, tools)
        self._current = context
        return await context.generate(sampling=sampling, max_tokens=max_tokens)

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
        """Calls a tool under the task's limit and the engine's capacity; a sync one in a worker thread.

        The call is recorded before it begins, and its result or error after it. If the rollout is cut and its loop runs
        again, the loop gets what is recorded; the tool isn't called.

        Args:
            function: The tool. What it returns must be JSON values or bytes, or have a codec (`register_codec`).
            args: What it is called with. They tell its calls apart when the loop runs again.
            replay: `"rerun"` calls it again when the loop runs again, for tools that keep a state of their own. If it
                doesn't end as it did before, the sample begins anew, with nothing recorded.
            on_unknown: What happens when the loop runs again and the call had begun, but not ended: `"rerun"` calls it
                again, under the same `tool_key()`; `"fail"` fails the sample.

        Raises:
            ToolError: It raised, or ran out of time, now or when it was recorded.
            LoopError: A journal can't hold what it returned, or a codec failed. It is not called at all where its
                annotation says so, or where the codec of an argument failed.
            ValueError: `replay` or `on_unknown` is none of these.

        Cancellation: an async tool is cancelled; a sync one's thread is abandoned.
        """
        name = self._check_tool(function, replay, on_unknown)

        async def call(_: str) -> tuple[Any, Plain]:
            answer = await self._call_tool(name, function, *args)
            return answer, encode(answer, f"tool {name} returned")

        return await self._use_tool(
            name, tool_identity(function, args), replay=replay, on_unknown=on_unknown, call=call
        )

    def _check_tool(self, function: Callable[..., object], replay: str, on_unknown: str) -> str:
        """Checks what is asked for before anything is recorded; returns the tool's name."""
        check_tool_options(replay, on_unknown)
        name = getattr(function, "__name__", repr(function))
        unrecordable = unrecordable_return(function)
        if unrecordable is not None:
            raise LoopError(
                f"tool {name} returns a {unrecordable}, which a journal can't hold; return JSON values or bytes, or "
                "tell rollnest how with register_codec()"
            )
        return name

    async def _use_tool(
        self,
        name: str,
        asked: tuple[str, str],
        *,
        replay: ToolReplay,
        on_unknown: OnUnknown,
        call: Callable[[str], Awaitable[tuple[Any, Plain]]],
    ) -> Any:
        """Calls a tool that is known by its name and a fingerprint of what it is given, or gives its record again.

        Args:
            name: What it is called in messages.
            asked: What tells its calls apart.
            replay: As for `tool`.
            on_unknown: As for `tool`.
            call: Calls it, under this key; returns its answer, and that as a journal holds it.
        """
        recorded, is_recorded = self._begin_call("tool", *asked)
        before = recorded.outcome
        if is_recorded and before is None and on_unknown == "fail":
            message = (
                f"tool {name} ran when its rollout was cut, and nobody knows whether it took effect"
            )
            self._core.failure = Failure("tool", message)
            await checkpoint()
            raise ToolError(message)
        if before is not None and replay == "recorded":
            await checkpoint()
            return _result(before, ToolError)
        key = f"{self.uid}/{recorded.begun}"
        self._core.services.instruments.tell("tool_started", key, name, before is not None)
        after: Outcome
        try:
            with in_tool(key):
                answer, plain = await call(key)
            after = Returned(plain)
        except ToolError as error:
            after = Raised(str(error))
            self._end_call(recorded, name, before, after)
            raise
        self._end_call(recorded, name, before, after)
        return answer

    async def _call_tool(self, name: str, function: Callable[[*Ts], Any], *args: *Ts) -> Any:
        services = self._core.services
        limit = services.gate.limit(services.limits.tool)
        call = Call(services.tool_slots, f"tool {name}", self, self._core)
        try:
            if iscoroutinefunction(function):
                async with call:
                    with limit:
                        return await function(*args)
            return await services.workers.run(
                call, limit, function, *args, patience=services.limits.tool
            )
        except OverLimit as error:
            raise ToolError(f"tool {name} took over {services.limits.tool} s") from error
        except Exception as error:
            raise ToolError(f"tool {name} raised {describe(error)}") from error
        except BaseException as error:
            if is_stray(error, in_loop=True):
                raise ToolError(f"tool {name} cancelled itself") from error
            raise
        finally:
            self._core.since = services.gate.ended()

    def score(self, value: float, /, **parts: float) -> None:
        """Sets the sample's verdict; the task's judger isn't asked then. Calling it again replaces it.

        It stands whatever is generated afterwards. A sample that fails has no verdict all the same.

        Args:
            value: The reward.
            parts: Named parts of it, for statistics.

        Raises:
            JudgeError: A number is not finite, or none; the verdict is as it was.
            LoopError: The task's judger judges whole groups, or the sample was made.
        """
        self._check_judging("score()")
        said = "score() got"
        named = {name: as_score(part, said) for name, part in parts.items()}
        self._scored = Verdict(as_score(value, said), parts=named)

    async def judge(self) -> Verdict:
        """Asks the task's judger now, about what is there: the turns so far, without one that is still running.

        The verdict is the sample's, and the judger isn't asked again, by this or after the loop, unless another turn
        came since. After `score` the loop's own verdict is returned. The time counts towards `Limits.sample`.

        Raises:
            JudgeError: There is no verdict. If the loop goes on, the judger is asked again when it has returned.
            LoopError: The task has no judger, or one that judges whole groups; or there is nothing to be judged.

        Cancellation: as a judger after the loop: an async one is cancelled, a sync one's thread is abandoned. Nothing
        is recorded.
        """
        judging = self._check_judging("judge()")
        verdict = self._verdict
        if verdict is not None:
            await checkpoint()
            return verdict
        if judging is None:
            raise LoopError("judge() on a task without a judger")
        turns = len(self._core.turns)
        sample = self._snapshot()
        call, _ = self._begin_call("judge", "", f"{turns} turns, {sample.policy_tokens} tokens")
        if call.outcome is not None:
            await checkpoint()
            verdict = _result(call.outcome, JudgeError)
        else:
            assert self._log is not None
            try:
                verdict = await judging.verdict(sample)
            except JudgeError as error:
                self._log.end(call, Raised(str(error)))
                raise
            self._log.end(call, Judged(verdict))
        self._judged = verdict, turns
        return verdict

    def segment(self, ids: Iterable[int]) -> Context:
        """Opens another token context, with a prompt of its own.

        Contexts may generate side by side, so sub-agents can work at once; all count against
        `max_response_tokens`.
        """
        return self._core.open(ids)

    def finish(self, reason: str) -> None:
        """Ends the sample as completed, for this reason. The loop should return then."""
        self._core.finish_reason = reason

    def fail(self, reason: str) -> None:
        """Ends the sample as failed, for this reason. The loop should return then."""
        self._core.failure = Failure("loop", reason)

    def __repr__(self) -> str:
        state = "done" if self.done else f"{self.remaining} tokens left"
        return f"<Rollout {self.uid}: {len(self._core.turns)} turns, {state}>"

    # What the engine does with it

    @property
    def policy_tokens(self) -> int:
        """Tokens recorded so far."""
        if self._frozen is not None:
            return sum([segment.response.policy_tokens for segment in self._frozen])
        replay = self._core.replay
        pending = 0 if replay is None else replay.pending_tokens
        return pending + sum([context.policy_tokens for context in self._core.contexts])

    def _give_up(self) -> None:
        counters = self._core.services.counters
        counters.restarted += 1
        counters.discarded += self.policy_tokens
        self._core.frozen = True

    def _journal(self, aborted: Sample) -> Journal | None:
        return self._later_journal(aborted)()

    def _later_journal(self, sample: Sample) -> Callable[[], Journal | None]:
        core = self._core
        asked = tuple(core.asked)
        calls = () if self._log is None else tuple(self._log.calls.values())
        seed, attempts, place = self._seed, core.attempts, self._place

        def make() -> Journal | None:
            journal = Journal.of(sample, asked, calls, seed=seed, attempts=attempts, place=place)
            return None if journal.is_empty else journal

        return make

    def _note(self, now: float) -> Callable[[], RolloutNote]:
        core = self._core
        calls = () if self._log is None else tuple(self._log.calls.values())
        unopened = None if core.replay is None else self._note_replay(core.replay, calls)
        # Done for each rollout in flight in one step. Turns are only added, so how many there are says what there was.
        return partial(
            self._noted,
            now,
            core.finish_reason,
            [note_context(context) for context in core.contexts],
            len(core.turns),
            calls,
            core.attempts,
            core.cut,
            self.policy_tokens if self._must_restart else None,
            unopened,
        )

    @staticmethod
    def _note_replay(
        replay: Replay, calls: Sequence[RecordedCall]
    ) -> tuple[list[ContextNote], list[RecordedCall]]:
        """What the loop has not asked for again."""
        known = {call.begun for call in calls}
        return [
            ContextNote(c.prompt_ids, c.response, c.end, recorded=tuple(c.turns))
            for c in replay.contexts
        ], [call for call in replay.calls if call.begun not in known]

    def _noted(
        self,
        now: float,
        finish_reason: str | None,
        opened: Sequence[LaterContext],
        turns: int,
        calls: tuple[RecordedCall, ...],
        attempts: int,
        cut: bool,
        lost: int | None,
        unopened: tuple[list[ContextNote], list[RecordedCall]] | None,
    ) -> RolloutNote:
        """Makes the note of what there was."""
        core = self._core
        contexts: list[ContextNote] = []
        discarded = unseen = 0
        for later in opened:
            note, tokens, requests = read_context_note(later)
            contexts.append(note)
            discarded += tokens
            unseen += requests
        if unopened is not None:
            contexts += unopened[0]
            calls += tuple(unopened[1])
        return RolloutNote(
            index=self._index,
            seconds=now - self._started,
            finish_reason=finish_reason,
            contexts=contexts,
            turns=core.turns[:turns],
            asked=core.asked[:turns],
            calls=calls,
            seed=self._seed,
            attempts=attempts,
            place=self._place,
            cut=cut,
            discarded=discarded if lost is None else lost,
            unseen=unseen,
            restarts=lost is not None,
        )

    def tree(
        self,
        now: float,
        calls: Mapping[object, Sequence[Call]],
        judging: Sequence[Call],
        *,
        judged: bool,
    ) -> SampleTree:
        """Where it stands.

        Args:
            now: The event loop's time.
            calls: Calls of tools, by who waits for them.
            judging: Calls of judgers that it waits for.
            judged: Whether it has ended, and was judged as far as it can be without its siblings.
        """
        core = self._core
        waits = [context.wait(now) for context in core.contexts if context.busy]
        waits += [call.wait(now) for call in (*calls.get(core, ()), *judging)]
        if not waits:
            waits = [core.rest(now, judged=judged)]
        responses = [segment.response for segment in self._frozen or ()]
        versions = [part.oldest_version for part in responses or core.contexts]
        return SampleTree(
            uid=core.uid,
            index=self._index,
            status="live",
            turns=len(core.turns),
            tokens=self.policy_tokens,
            version=min((v for v in versions if v is not None), default=None),
            waits=tuple(waits),
        )

    def _freeze(self, status: Status, failure: Failure | None) -> Sample:
        """See `freeze_rollout`."""
        core = self._core
        core.frozen = True
        if core.replay is not None:
            self._end_replay(status)
        segments = self._frozen
        if segments is None:
            segments = tuple([freeze_context(context, core.cut) for context in core.contexts])
            self._frozen = segments
            core.contexts.clear()  # a ring: only the garbage collector could free it
        if status is Status.COMPLETED:
            failure = core.failure
            if failure is None and not _policy_tokens(segments):
                failure = Failure("loop", "the loop returned without generating a token")
            if failure is not None:
                status = Status.FAILED
            elif self._scored is not None or self._judged is not None:
                return self._sample(status, segments, verdict=self._verdict)
        return self._sample(status, segments, failure)

    def _end_replay(self, status: Status) -> None:
        replay = self._core.replay
        assert replay is not None
        if status is not Status.ABORTED:
            replay.cut(0)  # the loop has ended, and did not ask for it again
        elif self._log is not None:
            self._log.calls |= {call.begun: call for call in replay.calls}
        self._core.rewind()

    def _begin_call(self, kind: CallKind, name: str, given: str) -> tuple[RecordedCall, bool]:
        """Records that a call begins, or finds what is recorded of it; says whether it was."""
        core = self._core
        if self._must_restart:
            raise LoopError(f"a call on rollout {self.uid}, which began anew")
        log = self._log
        if log is None:
            log = self._log = CallLog(None)
        task, strand = id(core.services.current_task()), None
        if task == core.main:
            strand = MAIN
        else:
            caller = _caller.get(None)
            if caller is not None and caller[:2] == (task, log):
                strand = caller[2]
        call = log.begin(core.begun, strand, kind, name, given, core.replay)
        if strand is None:
            _caller.set((task, log, call.strand))
        if call.begun < core.begun:
            return call, True
        core.begun += 1
        core.go_live()
        return call, False

    def _end_call(
        self, call: RecordedCall, name: str, before: Outcome | None, after: Outcome
    ) -> None:
        """Records how a tool ended; if it was recorded before, it must have ended so then too."""
        services = self._core.services
        key = f"{self.uid}/{call.begun}"
        services.instruments.tell("tool_ended", key, name, before is not None)
        if before is not None and not _same_outcome(before, after):
            self._must_restart = True
            message = f"tool {name} did not do the same again, so the sample begins anew"
            self._core.failure = Failure("tool", message)
            raise LoopError(message)
        assert self._log is not None
        self._log.end(call, after)

    @property
    def _verdict(self) -> Verdict | None:
        """The verdict that the loop set, or asked for and that still holds."""
        if self._scored is not None:
            return self._scored
        if self._judged is not None and self._judged[1] == len(self._core.turns):
            return self._judged[0]
        return None

    def _check_judging(self, what: str) -> GroupJudging | None:
        if self._core.frozen:
            raise LoopError(f"{what} on rollout {self.uid}, whose sample was made")
        if self._judging is not None and self._judging.by_group:
            raise LoopError(f"{what} on a task whose judger judges whole groups")
        return self._judging

    def _snapshot(self) -> Sample:
        core = self._core
        if core.failure is not None:
            raise LoopError(f"judge() on rollout {self.uid}, which was failed")
        segments = tuple(context.snapshot(trim=core.cut) for context in core.contexts)
        if not any(segment.response.policy_tokens for segment in segments):
            raise LoopError("judge() before anything was generated")
        return self._sample(Status.COMPLETED, segments)

    def _sample(
        self,
        status: Status,
        segments: tuple[Segment, ...],
        failure: Failure | None = None,
        verdict: Verdict | None = None,
        turns: Sequence[Turn] | None = None,
    ) -> Sample:
        core = self._core
        untrimmed = turns is None and not core.cut
        turns = core.turns if turns is None else turns
        reason = core.finish_reason
        if core.cut:
            reason = "length"
        elif reason is None and core.turns:
            reason = core.turns[-1].finish_reason
        services = core.services
        return make_sample(
            services.task,
            core.prompt,
            self._visit,
            self._index,
            status,
            segments,
            tuple(turns if untrimmed else [within(t, segments[t.segment]) for t in turns]),
            reason,
            verdict,
            failure,
            services.sampling,
            services.capabilities.logprobs,
            services.gate.clock() - self._started,
        )

    def _branch(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> Context | None:
        """The context that holds the longest beginning of a conversation, with the rest appended."""
        for context in sorted(self._core.contexts, key=lambda c: -len(c.messages or ())):
            known = context.messages
            if known is None or context.busy or (tuple(tools) if tools else None) != context.tools:
                continue
            if len(known) > len(messages) or not all(map(_same, known, messages)):
                continue
            rest = messages[len(known) :]
            if not rest and not context.policy_tokens:
                return context
            if rest and not any(message.get("role") == "assistant" for message in rest):
                return context.append_messages(rest)
        return None


def tool_identity(function: Callable[..., object], args: Sequence[object]) -> tuple[str, str]:
    """A tool's name and a fingerprint of what it is given, the same whenever the loop runs."""
    while isinstance(function, partial):
        bound = cast("partial[object]", function)
        args = (*bound.args, bound.keywords, *args)
        function = bound.func
    name = getattr(function, "__name__", type(function).__qualname__)
    return name, fingerprint(args, f"tool {name} was given")


def _result(outcome: Outcome, error: type[RollnestError]) -> Any:
    match outcome:
        case Returned(value):
            return decode(value)
        case Judged(verdict):
            return verdict
        case Raised(message):
            raise error(message)


def _same_outcome(one: Outcome, other: Outcome) -> bool:
    if isinstance(one, Returned) and isinstance(other, Returned):
        return same(one.value, other.value)
    return one == other


def _policy_tokens(segments: Sequence[Segment]) -> int:
    return sum([segment.response.policy_tokens for segment in segments])


def _same(one: Message, other: Message) -> bool:
    """Whether two chat messages say the same; keys without a value don't count."""
    return _said(one) == _said(other)


def _said(message: Message) -> Mapping[str, object]:
    return {key: value for key, value in message.items() if value is not None}
