"""What others implement: controllers, tokenizers, judgers, instruments.

All are protocols, so an adapter needs no base class of ours. `Instrument` has one for convenience.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from attrs import Attribute, field, frozen
from attrs.validators import in_

from ._attempt import Attempt as Attempt
from ._attempt import FinishReason as FinishReason
from ._checks import real, whole
from ._records import Batch, EvalResult, Group, Message, Prompt, Sample, Verdict
from ._tree import StallReport

__all__ = [
    "Attempt",
    "BatchJudger",
    "Capabilities",
    "CompositeJudger",
    "Curriculum",
    "FinishReason",
    "Health",
    "InferenceController",
    "Instrument",
    "JudgeFunction",
    "Judger",
    "JudgerLike",
    "PauseMode",
    "ReleaseTag",
    "PromptSource",
    "SamplingField",
    "Tokenizer",
    "VerdictLike",
    "WeightSource",
]


class PauseMode(Enum):
    """What happens to the turns in flight when the engine pauses.

    Attributes:
        KEEP: The server freezes them where they are, and they go on after the pause, under new weights too; no request
            is sent twice. Only where the controller offers it and reports the version of each token (`pause_modes`,
            `version_spans`); elsewhere it is `ABORT`, and the log says so once.
        ABORT: The server is asked to abort and returns the partials; each turn keeps its own, waits at the gate
            and goes on from there with what remains of its budget.
        EVICT: As `ABORT`, and then the groups themselves are ended, so that nothing of them is left running. What they
            made is kept in the table, and they are drawn again before fresh prompts. Judgers get what is left of
            `grace`; a sample that they have not judged by then is judged when its group is drawn again.
        WAIT: They run to their end, for `grace` seconds at most; what is left then is treated as by `ABORT`.
    """

    KEEP = "keep"
    ABORT = "abort"
    EVICT = "evict"
    WAIT = "wait"


SamplingField = Literal[
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed"
]


def _frozen_modes(value: Iterable[PauseMode]) -> frozenset[PauseMode]:
    return frozenset(value)


def _are_servers_modes(_: Any, attribute: Attribute[Any], value: frozenset[Any]) -> None:
    for mode in value:
        if not isinstance(mode, PauseMode):
            raise TypeError(f"{attribute.name} must hold PauseModes, got {mode!r}")
    if not {PauseMode.ABORT} <= value <= {PauseMode.ABORT, PauseMode.KEEP}:
        raise ValueError(
            f"{attribute.name} must hold ABORT, and may hold KEEP; the others are the engine's, got "
            f"{sorted(mode.name for mode in value)}"
        )


ReleaseTag = Literal["kv", "weights"]
"""What a controller may be able to give its memory back of: the cache of keys and values, or the weights."""

_RELEASE_TAGS = ("kv", "weights")


def _frozen_tags(value: Iterable[ReleaseTag]) -> frozenset[ReleaseTag]:
    if isinstance(value, str):
        raise TypeError(f"release_tags must hold tags, got the string {value!r}")
    return frozenset(value)


def _are_release_tags(_: Any, attribute: Attribute[Any], value: frozenset[Any]) -> None:
    for tag in value:
        if tag not in _RELEASE_TAGS:
            raise ValueError(f"{attribute.name} may hold 'kv' and 'weights', got {tag!r}")


def _frozen_ids(value: Iterable[int]) -> frozenset[int]:
    return frozenset(value)


def _frozen_fields(value: Iterable[SamplingField]) -> frozenset[SamplingField]:
    return frozenset(value)


@frozen(kw_only=True)
class Capabilities:
    """What a controller can do; known once it was entered.

    Attributes:
        vocab_size: Ids are in `range(vocab_size)`; checked on every token that arrives.
        max_context: Most tokens of prompt and response together.
        logprobs: `"processed"` if logprobs are of the distribution that was sampled from, `"raw"` if they are from
            before temperature and filters.
        stop_token_ids: Ids that end a turn by themselves: the model's end-of-sequence ids.
        sampling: Sampling fields that a single attempt may set to something else than their default.
        fixed: Sampling fields that the controller can only serve with one value, and that value.
        version_spans: Whether it reports the weight version of each token, so that one attempt may have several.
        pause_modes: What its `pause` can be asked for: `ABORT`, which every controller can, because the engine has
            brought the turns to rest before; and `KEEP`, if it can freeze requests in flight and let them go on.
        release_tags: What its `release` can give the memory back of.
    """

    vocab_size: int = field(validator=whole(1))
    max_context: int = field(validator=whole(2))
    logprobs: Literal["raw", "processed"] = field(
        default="processed", validator=in_(("raw", "processed"))
    )
    stop_token_ids: frozenset[int] = field(default=frozenset[int](), converter=_frozen_ids)
    sampling: frozenset[SamplingField] = field(
        default=frozenset["SamplingField"](), converter=_frozen_fields
    )
    fixed: Mapping[SamplingField, Any] = field(factory=dict[SamplingField, Any])
    version_spans: bool = False
    pause_modes: frozenset[PauseMode] = field(
        default=frozenset({PauseMode.ABORT}), converter=_frozen_modes, validator=_are_servers_modes
    )
    release_tags: frozenset[ReleaseTag] = field(
        default=frozenset["ReleaseTag"](),
        converter=_frozen_tags,
        validator=_are_release_tags,
    )


@frozen(kw_only=True)
class Health:
    """What a server that works says of its load; `None` is what it does not say.

    Attributes:
        running: Requests that it is generating for.
        waiting: Requests that wait at the server, because it has no room for them.
        cache: Share of its memory for keys and values that is in use, 0 to 1.
    """

    running: int | None = field(default=None, validator=whole(0, optional=True))
    waiting: int | None = field(default=None, validator=whole(0, optional=True))
    cache: float | None = field(default=None, validator=real(0, 1, optional=True))


WeightSource: TypeAlias = "Mapping[str, Any] | str | PathLike[str] | Callable[[], Awaitable[None]]"
"""Where new weights come from: a state dict, a directory, or a callable that moves them itself."""


class InferenceController(Protocol):
    """The policy's server, or several. An async context manager that the engine enters and leaves.

    The engine calls `generate` many times at once, and everything else one at a time. It closes its gate before it
    calls `abort`, `pause` or `update_weights`, so no new request comes in between. Only `health` may be called at any
    time.
    """

    async def __aenter__(self) -> Any:
        """Opens it; `capabilities` are known afterwards."""
        ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> bool | None:
        """Closes it: no request, task or connection is left. The engine gives it `exit_grace` seconds."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    async def generate(self, attempt: Attempt) -> None:
        """Continues `attempt.prompt_ids`.

        Commits whatever arrives with `attempt.commit`, at once and synchronously, and returns after
        `attempt.finish`. An abort is an ordinary finish.

        Cancellation: tells the server, drops the request and returns soon; what was committed stays.

        Raises:
            InferenceError: The server failed. If it is `retryable`, what was committed before is kept, and the engine
                goes on from there with another attempt: the controller has seen to it that the server is done with
                this one. Otherwise nothing of it is used. The engine is the one that retries; a controller does not.
        """
        ...

    async def abort(self, ids: Collection[str] | None) -> None:
        """Asks the server to end attempts early; their `generate` calls return with the partial.

        Args:
            ids: Ids of the attempts, or `None` for all. Unknown and finished ones are ignored.

        Returns when the request is sent, not when it took effect; may be called again for the same ids.

        Cancellation: may leave some unasked.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Returns once no forward pass can run, until `resume`.

        Args:
            mode: One of `Capabilities.pause_modes`. With `ABORT` nothing is in flight but what the engine has given up.
                With `KEEP` requests in flight stand still, and go on after `resume`; tokens that they make then have
                the version of that time.

        Cancellation: the engine calls `resume` afterwards.
        """
        ...

    async def resume(self) -> None:
        """Lets forward passes run again. Idempotent."""
        ...

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Loads new weights; called only while paused. Nothing cached under older weights is used afterwards.

        Raises:
            WeightUpdateFailed: Says which weights the policy holds now. Any other error means that nobody knows.
        """
        ...

    async def version(self) -> int | None:
        """Returns the weight version that the server itself reports; `None` if it keeps none."""
        ...

    async def health(self) -> Health:
        """Asks the server whether it works, and how much it has to do.

        The engine does not ask, a pool does; also while another call runs, in a pause, and while memory is released.

        Raises:
            InferenceError: It does not work, or can't be reached. Without an answer this call waits; whoever asks has a
                deadline.
        """
        ...

    async def release(self, tags: Collection[ReleaseTag]) -> None:
        """Gives memory back; called only while paused, with nothing in flight, and with tags of `release_tags`.

        Until `reload` the engine makes no call that needs what was released: none at all but `reload` while the weights
        are, and neither `generate` nor `resume` while the cache is. Idempotent.

        Cancellation: the engine reloads all tags afterwards.
        """
        ...

    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        """Takes the memory again: the weights are as before the release, the cache is empty. Idempotent.

        Tags that are not released are ignored.
        """
        ...


class Tokenizer(Protocol):
    """Turns text and chat messages into ids and back.

    Rendering and encoding may be slow: the engine calls `render` of prompts in a worker thread.
    """

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end a turn of the assistant; the first thing looked for at a turn's end."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the ids of raw text, without special tokens added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens."""
        ...

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None
    ) -> list[int]:
        """Returns the ids of a conversation up to where the assistant is to go on, by the chat template, once."""
        ...

    def render_suffix(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        closed: bool,
    ) -> list[int] | None:
        """Returns what follows an assistant turn when `messages` (none of the assistant) come after it.

        The suffix goes up to where the assistant is to go on. It begins with the template's end of the assistant
        turn unless `closed`: then the turn ended with a stop token that stands for it.

        Returns:
            The ids, or `None` where the template has no such suffix, because it rewrites what came before.
        """
        ...


VerdictLike: TypeAlias = "Verdict | float | Mapping[str, Any]"
"""What a judger may answer: a `Verdict`, a number (bool and numpy or torch scalars too), or a mapping with `score`."""


@runtime_checkable
class Judger(Protocol):
    """Turns a completed sample into a verdict. `judge` may be sync (runs in a worker thread) or async.

    A judger, also one that is just a function, may have an attribute `uses_policy = True`, if it asks the policy that
    is trained: it is then asked only while the gate is open, and holds no judge slot while it waits for that.
    """

    def judge(self, sample: Sample, /) -> VerdictLike | Awaitable[VerdictLike]:
        """Returns the verdict.

        Cancellation: a sync one can't be stopped; its thread is given up, named and counted.
        """
        ...


@runtime_checkable
class BatchJudger(Protocol):
    """Judges all members of a group at once, for rewards that depend on the siblings. Sync or async.

    One that has `judge` too is asked by `judge`, sample by sample, unless it has an attribute `judges_groups = True`.
    """

    def batch_judge(
        self, samples: Sequence[Sample], /
    ) -> Sequence[VerdictLike] | Awaitable[Sequence[VerdictLike]]:
        """Returns one answer for each sample, in their order.

        Called once for each group, if all its members completed. A wrong number of answers, or one that is no
        verdict, fails every member.

        Cancellation: as `Judger.judge`.
        """
        ...


@runtime_checkable
class CompositeJudger(Protocol):
    """Asks other judgers, and makes one verdict of theirs. The engine does the asking.

    Both methods are called on the event loop, so they must not block.
    """

    def select(self, prompt: Prompt, /) -> Mapping[str, JudgerLike]:
        """Returns the judgers that this prompt's samples need, by name; at least one."""
        ...

    def combine(self, sample: Sample, verdicts: Mapping[str, Verdict], /) -> VerdictLike:
        """Returns the verdict, from those of the selected judgers by name."""
        ...


JudgeFunction: TypeAlias = "Callable[[Sample], VerdictLike | Awaitable[VerdictLike]]"
"""The simplest judger: a function of a sample, sync (runs in a worker thread) or async."""

JudgerLike: TypeAlias = "Judger | BatchJudger | CompositeJudger | JudgeFunction"
"""Whatever may judge."""


@runtime_checkable
class PromptSource(Protocol):
    """Draws prompts in an order of its own: a data set that is read bit by bit, a curriculum, an environment.

    Only one call of it runs at a time.
    """

    def draw(
        self,
    ) -> (
        Prompt | str | Sequence[Message] | Awaitable[Prompt | str | Sequence[Message] | None] | None
    ):
        """Returns the next prompt, a `Prompt`, a string or messages; `None` once there are no more.

        It is asked when a group may start, never before. A plain function runs in a worker thread; an `async def` is
        awaited on the event loop. A prompt may be given again: that is another visit. Two different prompts must not
        have one `uid`. Strings and messages are named by their number.

        Cancellation: a plain `draw` runs to its end, and what it returned is handed out next. In an async one, move on
        after your last await, so that a draw that is cut has taken nothing.
        """
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Returns where it is, as plain data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        ...


@runtime_checkable
class Curriculum(PromptSource, Protocol):
    """A source that hears how its prompts went."""

    def report(self, group: Group) -> None:
        """Hears of a group that has ended: ready, filtered or failed. Not of one that was cut and begins again.

        Called on the event loop, never while `draw` runs; so keep it short.
        """
        ...


class Instrument:
    """Hears what the engine does. Override what you need.

    All methods are called synchronously on the event loop, right after the fact. Keep them short. One that raises is
    taken out and the error is logged.
    """

    def group_started(self, task: str, visit: int) -> None:
        """A group began."""

    def group_ended(self, group: Group, outcome: str) -> None:
        """A group's members have all ended; `outcome` is `"ready"`, `"waiting"`, or the reason it was dropped."""

    def turn_started(self, attempt: Attempt) -> None:
        """A request goes to the server."""

    def turn_ended(self, attempt: Attempt) -> None:
        """A request came back, failed or was cut; the attempt says which."""

    def tool_started(self, key: str, name: str, again: bool) -> None:
        """A loop's tool is called.

        Args:
            key: What `tool_key()` returns in it.
            name: The tool's name.
            again: Whether it had ended before, and is called once more because its loop runs again (`replay="rerun"`).
        """

    def tool_ended(self, key: str, name: str, again: bool) -> None:
        """A tool returned or raised; not told of one that was cancelled."""

    def sample_ended(self, sample: Sample) -> None:
        """A sample was frozen."""

    def groups_expired(self, task: str, count: int) -> None:
        """That many groups, which were ready, have become too old: they are drawn again, or dropped."""

    def judge_started(self, name: str) -> None:
        """A judger got its slot, and is asked; the name says which, and for whom."""

    def judge_ended(self, name: str, seconds: float) -> None:
        """A judger gave its slot back after that long: it has answered, failed, or was cut."""

    def slot_lost(self, name: str) -> None:
        """Nobody waits for this judger or tool any more, but its thread can't be stopped, and keeps the slot.

        A judger's `judge_ended` comes when the thread ends.
        """

    def gate_closed(self, in_flight: int) -> None:
        """A pause began, with that many turns at the server."""

    def paused(self, quiet_seconds: float) -> None:
        """The pause's block is entered: no forward pass can run."""

    def pause_failed(self, error: Exception) -> None:
        """A pause did not come about; production goes on with the old weights."""

    def weights_updated(self, version: int) -> None:
        """The policy has new weights; no turn has used them yet."""

    def gate_opened(self, version: int) -> None:
        """Production goes on."""

    def outage_began(self, error: Exception) -> None:
        """The policy's server is down: requests failed, and so did a probe, with this error."""

    def outage_ended(self, seconds: float) -> None:
        """It answers again, after that long; pauses are not counted."""

    def evaluation_ended(self, result: EvalResult) -> None:
        """An evaluation has ended; its samples and groups are told to nobody else, its requests are."""

    def stalled(self, report: StallReport) -> None:
        """Nothing has finished for a while, though a batch is waited for; the report names who waits for what."""

    def loop_lagged(self, seconds: float, where: str) -> None:
        """The event loop did not run for that long, which is over 0.25 s, because it was in that line of code."""

    def engine_broken(self, why: str, error: BaseException) -> None:
        """The engine can't go on; every call raises from now on."""

    def batch_delivered(self, batch: Batch) -> None:
        """A batch was handed to the trainer."""
