"""A controller without a model: it plays a script, under virtual time, and keeps a log of its own."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from types import TracebackType
from typing import Any, Literal, TypeAlias

from anyio import CancelScope, Event, current_time, move_on_after, sleep, sleep_forever
from anyio.lowlevel import checkpoint
from attrs import field, frozen

from rollnest._attempt import Attempt
from rollnest.abc import Capabilities, Health, PauseMode, ReleaseTag, SamplingField, WeightSource
from rollnest.errors import InferenceError, WeightsState, WeightUpdateFailed

__all__ = ["Reply", "Script", "ScriptedController", "Stall", "expected_logprob", "expected_token"]

_ALL_SAMPLING: frozenset[SamplingField] = frozenset(
    {"min_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed"}
)


@frozen
class Reply:
    """What the scripted server answers to one attempt.

    Attributes:
        ids: The tokens; cut at the attempt's cap like a server would.
        finish: `"stop"`, `"length"`, `"abort"`, or something no server should say. Becomes `"length"` at the cap.
        logprobs: One for each id; `None` makes `expected_logprob` of each.
        delay: Seconds until the answer; an abort in between brings the share that was due.
        error: Raised instead of answering, after `delay`.
        echo: What the server says the prompt was; `None` says nothing.
        versions: Weight versions of the tokens; `None` is the server's own.
        overrun: Whether tokens beyond the cap are sent all the same.
        deaf: How many aborts it ignores; -1 is all of them.
    """

    ids: Sequence[int]
    finish: str = field(default="stop", kw_only=True)
    logprobs: Sequence[float] | None = field(default=None, kw_only=True)
    delay: float = field(default=0.0, kw_only=True)
    error: Exception | None = field(default=None, kw_only=True)
    echo: Sequence[int] | None = field(default=None, kw_only=True)
    versions: Sequence[int] | None = field(default=None, kw_only=True)
    overrun: bool = field(default=False, kw_only=True)
    deaf: int = field(default=0, kw_only=True)


Script: TypeAlias = "Callable[[Attempt], Reply]"
"""Answers one attempt; called when the attempt arrives."""


def expected_token(
    prompt_ids: Sequence[int],
    *,
    vocab_size: int,
    stop_id: int,
    stop_every: int,
    version: int = 0,
    salt: str = "",
) -> int:
    """The token that the default script puts after these ids: a hash of all of them, so a continuation that was sent
    the right ids goes on exactly as the uninterrupted turn would have."""
    data = array("i", [version, *prompt_ids]).tobytes() + salt.encode()
    number = int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
    if number % stop_every == 0:
        return stop_id
    return 1 + (number >> 8) % (vocab_size - 1) if vocab_size > 2 else 1


def expected_logprob(token: int, version: int) -> float:
    """The logprob that weights of a version give a token here: different for each version, exact in float32."""
    return -(token % 64 + 1) / 64 - version


class ScriptedController:
    """Answers attempts by a script; public, so that loops, judgers and trainers can be tested without a model.

    Args:
        script: Answers each attempt. The default plays `expected_token` until a stop id or the cap.
        rate: Tokens per second of the default script; `None` answers at once.
        vocab_size: Ids are below it.
        max_context: Most tokens of prompt and response.
        stop_every: The default script stops with a chance of 1 in this.
        stream: Whether tokens are committed as they come, so that a cut turn keeps them.
        abort_delay: Seconds until an abort reaches the turns; a request that arrives in between is missed.
        admission: Seconds between a request's sending and its being known to the server: aborts miss it until then.
        pause_hangs: Whether `pause` never confirms.
        resume_failures: How often `resume` fails before it works.
        version: Weight version that it starts with.
        update_error: Raised by `update_weights`.
        capabilities: What it says it can do; `None` is everything.

    Attributes:
        log: What was called, in order, as tuples that begin with the call's name.
        open: Attempts that are being answered, by id.
        committed: Tokens that attempts recorded: the controller's own count.
        wasted: Tokens that were made but came too late or were rejected.
        prompts: Prompt ids of every attempt, in order of arrival.
        while_paused: Tokens made while paused; must stay 0.
        sampled: Tokens made, kept or not.
        weights: What the last update brought.
        refused: Calls that came while what they need was released; must stay empty.
        load: What `health` says of its load; `None` is what it has.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        rate: float | None = None,
        vocab_size: int = 1000,
        max_context: int = 4096,
        stop_every: int = 16,
        stream: bool = False,
        abort_delay: float = 0.0,
        admission: float = 0.0,
        pause_hangs: bool = False,
        resume_failures: int = 0,
        version: int = 0,
        update_error: BaseException | None = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        self._script = script or self._play
        self._rate = rate
        self._vocab_size = vocab_size
        self._stop_every = stop_every
        self._stream = stream
        self._abort_delay = abort_delay
        self._admission = admission
        self._pause_hangs = pause_hangs
        self._resume_failures = resume_failures
        self.update_error = update_error
        self._capabilities = capabilities or Capabilities(
            vocab_size=vocab_size,
            max_context=max_context,
            stop_token_ids={0},
            sampling=_ALL_SAMPLING,
            version_spans=True,
            pause_modes={PauseMode.ABORT, PauseMode.KEEP},
            release_tags={"kv", "weights"},
        )
        self._paused = False
        self._keeping = False
        self._released: set[ReleaseTag] = set()
        self._version = version
        self._entered = False
        self.log: list[tuple[Any, ...]] = []
        self.open: dict[str, _Answering] = {}
        self.committed: int = 0
        self.wasted: int = 0
        self.while_paused: int = 0
        self.prompts: list[list[int]] = []
        self.sampled: int = 0
        self.weights: WeightSource | None = None
        self.refused: list[str] = []
        self.load: Health | None = None
        self._stall: Stall | None = None
        self._down: Literal["refused", "silent"] | None = None

    # InferenceController

    async def __aenter__(self) -> ScriptedController:
        await checkpoint()
        self._entered = True
        self.log.append(("enter",))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered = self._paused = self._keeping = False
        self._released.clear()
        self.log.append(("exit", len(self.open)))
        await checkpoint()

    @property
    def capabilities(self) -> Capabilities:
        """What it says it can do."""
        return self._capabilities

    async def generate(self, attempt: Attempt) -> None:
        """Plays the script."""
        self._check_entered()
        if self._down is not None:
            await self._reach()
        self._refuse_released("generate")
        self.log.append(("generate", attempt.id))
        self.prompts.append(attempt.prompt_ids.tolist())
        answering = _Answering(attempt)
        self.open[attempt.id] = answering
        try:
            with answering.connection:
                await self._answer(answering)
            if answering.connection.cancelled_caught:
                await self._reach(reset=True)
            await checkpoint()  # like closing a connection: a checkpoint after the result
        finally:
            del self.open[attempt.id]

    async def abort(self, ids: Collection[str] | None) -> None:
        """Ends turns early, with the share of the answer that was due."""
        self.log.append(("abort", None if ids is None else tuple(ids)))
        await self._reach()
        self._refuse_released("abort")
        await checkpoint()
        if self._abort_delay:
            await sleep(self._abort_delay)
        for id_, answering in list(self.open.items()):
            if ids is None or id_ in ids:
                answering.abort()

    async def pause(self, mode: PauseMode) -> None:
        """Stops making tokens. With `KEEP` answers stand still where they are, and go on after `resume`."""
        self.log.append(("pause", mode))
        await self._reach()
        self._refuse_released("pause")
        if self._pause_hangs:
            await sleep_forever()
        if mode is PauseMode.KEEP:
            self._keeping = True
            for answering in self.open.values():
                answering.woken.set()
        try:
            for _ in range(2):
                await checkpoint()  # answers that an abort has ended go out first
        except BaseException:
            self._go_on()
            raise
        self._paused = True

    async def resume(self) -> None:
        """Makes tokens again."""
        self.log.append(("resume",))
        await checkpoint()
        await self._reach()
        self._refuse_released("resume")
        if self._resume_failures:
            self._resume_failures -= 1
            raise InferenceError("503: not yet", retryable=True)
        self._go_on()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Takes a new version."""
        self.log.append(("update_weights", version))
        await checkpoint()
        await self._reach()
        self._refuse_released("update_weights", but="kv")
        if not self._paused:
            raise WeightUpdateFailed(
                "weights can only be updated while paused", weights=WeightsState.OLD
            )
        if callable(source):
            await source()
        if self.update_error is not None:
            if getattr(self.update_error, "weights", None) is WeightsState.NEW:
                self._version = version
            raise self.update_error
        self.weights = source
        self._version = version

    async def version(self) -> int | None:
        """The version it has."""
        await checkpoint()
        await self._reach()
        self._refuse_released("version", but="kv")
        return self._version

    async def health(self) -> Health:
        """Works unless it was left or has crashed; `load` says how busy it is."""
        self._check_entered()
        await checkpoint()
        await self._reach()
        return self.load or Health(running=len(self.open), waiting=0)

    async def release(self, tags: Collection[ReleaseTag]) -> None:
        """Refuses every call that needs what is released, until `reload`; with the weights, that is every call."""
        self.log.append(("release", tuple(tags)))
        await checkpoint()
        await self._reach()
        if not self._paused or self.open:
            raise InferenceError("memory can only be released while paused, with nothing in flight")
        self._released.update(tags)

    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        """Takes back what was released."""
        self.log.append(("reload", tuple(tags)))
        await checkpoint()
        await self._reach()
        self._released.difference_update(tags)

    @contextmanager
    def stalled(self, *, after: int) -> Generator[Stall]:
        """Answers stop after so many tokens, one more being in the making, until the block is left."""
        self._stall = stall = Stall(after)
        try:
            yield stall
        finally:
            self._stall = None
            stall.over = True
            for answering in self.open.values():
                answering.woken.set()

    def crash(self, *, silent: bool = False) -> None:
        """The server dies. Requests in flight fail, what was committed stays, and calls find nobody, until `restart`.

        Args:
            silent: Nobody says so: requests and calls get no answer at all.
        """
        self.log.append(("crash",))
        self._down = "silent" if silent else "refused"
        self._paused = self._keeping = False
        self._released.clear()
        for answering in self.open.values():
            answering.connection.cancel()

    def restart(self, *, version: int = 0) -> None:
        """A crashed server is there again, with weights of a version, and knows of nothing."""
        self.log.append(("restart", version))
        self._down = None
        self._version = version

    # How it plays

    def _check_entered(self) -> None:
        if not self._entered:
            raise InferenceError("the scripted server is not open", maybe_executed=False)

    async def _reach(self, *, reset: bool = False) -> None:
        """Fails, or never returns, if the server has crashed."""
        if self._down == "silent":
            await sleep_forever()
        if reset:
            raise InferenceError("the connection was reset", retryable=True)
        if self._down:
            raise InferenceError("connection refused", retryable=True, maybe_executed=False)

    def _refuse_released(self, call: str, *, but: ReleaseTag | None = None) -> None:
        missing = self._released - {but}
        if missing:
            self.refused.append(call)
            raise InferenceError(
                f"{call}() while {', '.join(sorted(missing))} released", maybe_executed=False
            )

    def _go_on(self) -> None:
        self._paused = self._keeping = False
        for answering in self.open.values():
            answering.woken.set()

    async def _answer(self, answering: _Answering) -> None:
        attempt = answering.attempt
        await checkpoint()  # the request is sent
        await self._stand_still(answering)
        if self._admission:
            await sleep(self._admission)
        answering.admitted = True
        if self._keeping:
            await self._stand_still(answering)
        reply = self._script(attempt)
        answering.deaf = reply.deaf
        answering.plan(reply, self._version)
        try:
            await self._make(answering)
            while self._keeping and not answering.over:
                await self._stand_still(answering)
                answering.go_on()
                if answering.version != self._version:
                    self._plan_anew(answering)
                await self._make(answering)
        except BaseException:
            self.wasted += max(answering.made, answering.due()) - answering.sent
            raise
        if reply.error is not None:
            raise reply.error.with_traceback(None)  # one object may be raised many times
        if answering.aborted:
            self._commit(answering, answering.made)
            self._finish(attempt, "abort")
            return
        if reply.echo is not None:
            attempt.check_echo(reply.echo)
        self._commit(answering, len(answering.ids))
        at_cap = reply.finish == "stop" and len(reply.ids) > attempt.max_tokens
        self._finish(attempt, "length" if at_cap else answering.finish)

    async def _stand_still(self, answering: _Answering) -> None:
        """Waits while the server is paused, or until it is aborted."""
        while self._paused or self._keeping:
            if answering.aborted:
                return
            answering.woken = Event()
            await answering.woken.wait()

    async def _make(self, answering: _Answering) -> None:
        """Makes tokens until there are all, or it is aborted, or the server keeps still."""
        stall = self._stall
        if stall is not None and len(answering.ids) > stall.after:
            await self._stall_at(answering, stall)
            return
        while not answering.aborted:
            whole = len(answering.ids)
            goal = answering.sent + 1 if self._stream and whole else whole
            wait, reached = answering.time_of(goal) - current_time(), True
            if wait > 0 or self._stream:
                answering.woken = Event()
                with move_on_after(wait) as scope:
                    await answering.woken.wait()
                reached = scope.cancelled_caught
            answering.made = goal if reached else max(answering.made, answering.due())
            if self._stream:
                self._commit(answering, answering.made)
            if answering.made >= whole or self._keeping:
                return

    async def _stall_at(self, answering: _Answering, stall: Stall) -> None:
        """Stands still after so many tokens, one more being in the making, until the stall is over."""
        answering.made = max(answering.made, stall.after)
        stall.arrived.set()
        while not (answering.aborted or stall.over or self._keeping):
            answering.woken = Event()
            await answering.woken.wait()
        if answering.aborted:
            self.wasted += 1  # the one in the making
        elif stall.over and not self._keeping:
            answering.made = len(answering.ids)

    def _plan_anew(self, answering: _Answering) -> None:
        """The weights have changed in the middle of an answer: what is left comes from the new ones."""
        rest: Reply | None = None
        if self._script == self._play:
            rest = self._play(answering.attempt, answering.ids[: answering.made])
        answering.plan_anew(rest, self._version)

    def _commit(self, answering: _Answering, stop: int) -> None:
        start, answering.sent = answering.sent, max(answering.sent, stop)
        ids = answering.ids[start:stop]
        if not ids:
            return
        self.sampled += len(ids)
        if self._paused:
            self.while_paused += len(ids)
        versions = answering.versions
        recorded = 0
        try:
            recorded = answering.attempt.commit(
                ids,
                answering.logprobs[start:stop],
                versions if isinstance(versions, int) else versions[start:stop],
            )
        finally:
            self.committed += recorded
            self.wasted += len(ids) - recorded

    def _finish(self, attempt: Attempt, reason: str) -> None:
        self.log.append(("finish", attempt.id, reason, len(attempt.received)))
        attempt.finish(reason)

    def _play(self, attempt: Attempt, made: Sequence[int] = ()) -> Reply:
        ids = attempt.prompt_ids.tolist()
        start = len(ids)
        ids += made
        stops = {0, *attempt.sampling.stop_token_ids}
        while len(ids) - start < attempt.max_tokens:
            token = expected_token(
                ids,
                vocab_size=self._vocab_size,
                stop_id=0,
                stop_every=self._stop_every,
                version=self._version,
                salt=attempt.affinity,
            )
            ids.append(token)
            if token in stops:
                break
        answer = ids[start:]
        finish: Literal["stop", "length"] = "stop" if answer[-1] in stops else "length"
        delay = (len(answer) - len(made)) / self._rate if self._rate else 0.0
        return Reply(answer, finish=finish, delay=delay)

    def __repr__(self) -> str:
        state = "paused" if self._paused else "running"
        return f"<ScriptedController {state}, v{self._version}, {len(self.open)} open>"


class Stall:
    """An answer that stands still."""

    def __init__(self, after: int) -> None:
        self.after: int = after
        self.arrived: Event = Event()
        self.over: bool = False

    async def reached(self) -> None:
        """Returns once an answer stands still."""
        await self.arrived.wait()


class _Answering:
    """One attempt at the scripted server: what it is going to answer, when, and how far it is."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.connection = CancelScope()
        self.woken = Event()
        self.aborted = False
        self.admitted = False
        self.deaf = 0
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: int | list[int] = 0
        self.version = 0
        self.finish = "stop"
        self.made = 0  # tokens that the policy has made
        self.sent = 0  # of those, committed
        self._base = 0  # tokens that were there when the present plan was made
        self._started = 0.0
        self._delay = 0.0

    @property
    def over(self) -> bool:
        """Whether no token will be made any more."""
        return self.aborted or self.made >= len(self.ids)

    def plan(self, reply: Reply, version: int) -> None:
        """Decides what the policy of a version is going to make."""
        cap = None if reply.overrun else self.attempt.max_tokens
        self.reply = reply
        self.version = version
        self.ids = list(reply.ids)[:cap]
        self.logprobs = (
            [expected_logprob(i, version) for i in self.ids]
            if reply.logprobs is None
            else list(reply.logprobs)[:cap]
        )
        self.versions = version if reply.versions is None else list(reply.versions)[: len(self.ids)]
        self.finish = reply.finish
        self._started, self._delay = current_time(), reply.delay

    def go_on(self) -> None:
        """The clock of the plan stood still, and runs again."""
        whole = len(self.ids)
        self._delay *= (whole - self.made) / max(1, whole - self._base)
        self._base, self._started = self.made, current_time()

    def plan_anew(self, rest: Reply | None, version: int) -> None:
        """The rest is made by another version; `None` is the same tokens, with that version's logprobs.

        Of logprobs that the script gave only their number counts from here on: it can't have known the new weights.
        """
        made = self.made
        if rest is not None:
            self.ids = list(rest.ids)
            self.finish = rest.finish
            self._delay = rest.delay
        before = self.versions
        done = [before] * made if isinstance(before, int) else before[:made]
        fresh = self.ids[made:]
        wanted = len(fresh) if self.reply.logprobs is None else max(0, len(self.logprobs) - made)
        anew = [expected_logprob(i, version) for i in fresh[:wanted]]
        self.logprobs = self.logprobs[:made] + anew
        self.versions = done + [version] * len(fresh)
        self.version = version

    def time_of(self, count: int) -> float:
        """When so many tokens are made."""
        rest = len(self.ids) - self._base
        share = (count - self._base) / rest if rest else 1.0
        return self._started + self._delay * share

    def due(self) -> int:
        """How many tokens are made by now, if they take time."""
        if not self._delay:
            return self.made
        rest = len(self.ids) - self._base
        share = (current_time() - self._started) / self._delay
        return self._base + min(rest, int(rest * share + 1e-9))

    def abort(self) -> None:
        """Hears an abort, unless it has not arrived yet or is deaf to it."""
        if not self.admitted:
            return
        if self.deaf:
            self.deaf -= 1
            return
        self.aborted = True
        self.woken.set()
