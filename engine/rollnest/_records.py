"""The frozen records of the engine: prompts going in, samples, groups and batches coming out.

An outcome is decided in one place and frozen here; the constructors refuse what must not exist (I11: a
completed sample has an answer, and only a completed one has a verdict).
"""

from __future__ import annotations

import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from enum import Enum
from functools import partial
from typing import Any, Literal, cast

from attrs import Attribute, evolve, field, frozen
from attrs.validators import in_, instance_of, optional

from ._checks import check_real, check_whole, text, whole
from ._options import Sampling
from ._response import Response, token_column
from .errors import describe

__all__ = [
    "Batch",
    "BatchStatistics",
    "EvalResult",
    "Failure",
    "FailureKind",
    "Group",
    "Message",
    "Prompt",
    "Sample",
    "Segment",
    "Status",
    "ToolCall",
    "Turn",
    "Verdict",
]

Message = Mapping[str, Any]
"""One chat message, as chat templates take it: `role`, `content`, and what else the template knows."""

FailureKind = Literal["inference", "loop", "tool", "judge", "filter", "data"]


class Status(Enum):
    """How a sample stands. Only `COMPLETED` samples are trained."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"


# Of a group that is not completed as a whole, the first of these that one of its members has.
_GROUP_PRIORITY = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED, Status.INIT)


def _count(value: Sized) -> str:
    return str(len(value))


def _names(value: Iterable[str]) -> str:
    return ", ".join(value)


def _messages(value: Iterable[Message] | None) -> tuple[Message, ...] | None:
    return None if value is None else tuple(value)


def _prompt_ids(value: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def _groups(value: Iterable[Group]) -> tuple[Group, ...]:
    return tuple(value)


def _samples(value: Iterable[Sample]) -> tuple[Sample, ...]:
    return tuple(value)


def _check_messages(_: Any, attribute: Attribute[Any], value: Sequence[object] | None) -> None:
    for i, message in enumerate(value or ()):
        role = cast("Message", message).get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise TypeError(f"{attribute.name}[{i}] must be a mapping with a role, got {message!r}")


def _check_prompt_ids(_: Any, attribute: Attribute[Any], value: tuple[int, ...] | None) -> None:
    try:
        token_column(value or ())
    except (TypeError, ValueError) as error:
        raise type(error)(f"{attribute.name}: {error}") from None


@frozen(eq=False)
class Prompt:
    """One thing to answer.

    Attributes:
        uid: Its name, unique within its task.
        messages: Chat messages, rendered by the tokenizer's chat template.
        token_ids: The prompt's token ids, sent as they are; needs no tokenizer.
        label: What the judger compares with.
        data_source: Which judger or statistic it belongs to.
        tools: Tool schemas for the chat template.
        media: Opaque to the engine; handed to the loop and the judger.
        meta: Anything else that belongs to it.
    """

    uid: str = field(validator=text)
    messages: tuple[Message, ...] | None = field(
        default=None, kw_only=True, converter=_messages, validator=_check_messages
    )
    token_ids: tuple[int, ...] | None = field(
        default=None, kw_only=True, converter=_prompt_ids, validator=_check_prompt_ids, repr=False
    )
    label: Any = field(default=None, kw_only=True)
    data_source: str | None = field(
        default=None, kw_only=True, validator=optional(instance_of(str))
    )
    tools: tuple[Message, ...] | None = field(default=None, kw_only=True, converter=_messages)
    media: Any = field(default=None, kw_only=True, repr=False)
    meta: Mapping[str, Any] = field(factory=dict[str, Any], kw_only=True, repr=False)

    def __attrs_post_init__(self) -> None:
        if not self.messages and not self.token_ids:
            raise ValueError(f"prompt {self.uid!r} needs messages or token_ids, both are empty")


@frozen
class Verdict:
    """What a judger says of one sample.

    Attributes:
        score: The reward, finite.
        parts: Named parts of the score, for statistics.
        details: Anything else the judger wants to keep.
    """

    score: float
    parts: Mapping[str, float] = field(factory=dict[str, float], kw_only=True)
    details: Mapping[str, Any] = field(factory=dict[str, Any], kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_real("score", self.score, -float("inf"))
        for name, value in self.parts.items():
            check_real(f"parts[{name!r}]", value, -float("inf"))


@frozen
class Failure:
    """Why a sample failed: which boundary was crossed, and the error's text.

    It keeps no exception, so a parked sample holds no frames alive.
    """

    kind: FailureKind = field(
        validator=in_(("inference", "loop", "tool", "judge", "filter", "data"))
    )
    message: str
    traceback: str = field(default="", repr=False)

    @classmethod
    def of(cls, kind: FailureKind, error: BaseException) -> Failure:
        """Describes an error."""
        return cls(kind, describe(error), "".join(traceback.format_exception(error)))


@frozen
class ToolCall:
    """One call that the policy asked for, or what is wrong with its asking.

    Attributes:
        name: The tool's name, as far as it could be read.
        arguments: Its arguments; `None` if they could not be read.
        error: Why the call can't be made; `None` if it can.
        raw: The text it was read from.
    """

    name: str
    arguments: Mapping[str, Any] | None = None
    error: str | None = None
    raw: str = field(default="", repr=False)


@frozen(eq=False)
class Turn:
    """What one `generate()` brought.

    Attributes:
        finish_reason: `"stop"`, `"length"`, `"timeout"` if a limit ended it that lets turns finish, or `"abort"` if
            the loop itself cancelled the turn.
        text: The turn's text, decoded once from all its ids, without special tokens; `None` without a tokenizer.
        segment: Index of the segment it stands in.
        start: Where it starts in that segment's response.
        stop: Where it ends there.
        attempts: How many requests it took; above 1 it went on from a partial.
    """

    finish_reason: Literal["stop", "length", "timeout", "abort"]
    text: str | None
    segment: int
    start: int
    stop: int
    attempts: int
    _response: Response = field(repr=False, alias="response")

    @property
    def response(self) -> Response:
        """The turn's part of the response: ids, logprobs, versions."""
        return self._response[self.start : self.stop]

    @property
    def message(self) -> Message:
        """The turn as a chat message of the assistant; give it back to `chat` as it is."""
        return {"role": "assistant", "content": self.text or ""}

    @property
    def ids(self) -> memoryview[int]:
        """The sampled token ids, int32."""
        return self.response.ids

    def __len__(self) -> int:
        return self.stop - self.start


@frozen(eq=False)
class Segment:
    """One unbroken token context: the prompt's ids and the response's columns.

    Attributes:
        prompt_ids: int32, read-only.
        response: The columns after it, sealed.
        trained_from: Lowest weight version whose tokens are trained. Older ones stay what they are, and are masked.
    """

    prompt_ids: memoryview[int] = field(repr=_count)
    response: Response
    trained_from: int = 0

    def __attrs_post_init__(self) -> None:
        if self.trained_from != 0:
            check_whole("trained_from", self.trained_from, 0)
        if not self.response.sealed:
            raise ValueError("a segment's response must be sealed")

    def __reduce__(self) -> tuple[Callable[..., Segment], tuple[object, ...]]:
        """How it is pickled: a view can't be, the packed ids can."""
        return _segment, (token_column(self.prompt_ids), self.response, self.trained_from)

    @property
    def ids(self) -> memoryview[int]:
        """Response ids, int32."""
        return self.response.ids

    @property
    def logprobs(self) -> memoryview[float]:
        """Logprob of each response token when it was sampled, float32; 0.0 for context."""
        return self.response.logprobs

    @property
    def versions(self) -> memoryview[int]:
        """Weight version of each response token, int32; -1 for context."""
        return self.response.versions

    @property
    def mask(self) -> memoryview[int]:
        """1 where the response token is trained, uint8. Only tokens of the policy are, from `trained_from` on."""
        origin = self.response.origin
        if not self.trained_from:
            return origin
        first = self._first_trained
        return memoryview(bytes(first) + bytes(origin[first:]))

    @property
    def oldest_version(self) -> int | None:
        """The lowest version among its trainable tokens; `None` without any."""
        first = self.response.oldest_version
        if first is None or first >= self.trained_from:
            return first
        return min(
            (v for v, _, _ in self.response.version_runs if v >= self.trained_from), default=None
        )

    @property
    def _first_trained(self) -> int:
        # Versions never decrease, so whatever comes after the first such token is new enough or context.
        for version, start, _ in self.response.version_runs:
            if version >= self.trained_from:
                return start
        return len(self.response)

    def __len__(self) -> int:
        return len(self.response)


def _segment(prompt_ids: array[int], response: Response, trained_from: int) -> Segment:
    return Segment(memoryview(prompt_ids).toreadonly(), response, trained_from)


@frozen(eq=False, kw_only=True)
class Sample:
    """The frozen end of one rollout.

    Attributes:
        task: Name of its task.
        prompt: What was asked.
        visit: Number of the prompt's visit within the task; all members of a group share it.
        index: Its place in the group.
        status: How it ended.
        segments: Its token contexts, in the order they were opened.
        turns: What each `generate()` brought.
        finish_reason: Why it ended: the last turn's reason, or what the loop gave to `finish`.
        verdict: The judger's answer; only a completed sample has one.
        failure: Why it failed; only a failed sample has one.
        unjudged: Whether an aborted sample lacks its verdict only: its loop had returned. It is judged, and not made
            again, when its group is drawn again.
        sampling: The task's sampling.
        logprobs_mode: What its logprobs are: `"processed"` (of the distribution that was sampled from) or `"raw"`
            (before temperature and filters).
        generate_seconds: From the loop's start to its end.
        policy_tokens: Tokens that the policy sampled, over all segments.
        oldest_version: The lowest version among its trainable tokens; `None` without any.
    """

    task: str
    prompt: Prompt
    visit: int
    index: int
    status: Status
    segments: tuple[Segment, ...] = ()
    turns: tuple[Turn, ...] = field(default=(), repr=_count)
    finish_reason: str | None = None
    verdict: Verdict | None = None
    failure: Failure | None = None
    unjudged: bool = False
    sampling: Sampling | None = field(default=None, repr=False)
    logprobs_mode: Literal["raw", "processed"] = "processed"
    generate_seconds: float = 0.0

    policy_tokens: int = field(init=False, repr=False)
    oldest_version: int | None = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        tokens, oldest = 0, None
        for segment in self.segments:
            response = segment.response
            sampled = response.policy_tokens
            if sampled:
                tokens += sampled
                # Of nearly every segment all is trained: that takes one question less.
                first = segment.oldest_version if segment.trained_from else response.oldest_version
                if first is not None and (oldest is None or first < oldest):
                    oldest = first
        object.__setattr__(self, "policy_tokens", tokens)
        object.__setattr__(self, "oldest_version", oldest)
        if self.status is Status.COMPLETED and not tokens:
            raise ValueError("a COMPLETED sample needs at least one token of the policy")
        if self.verdict is not None and self.status in _NEVER_JUDGED:
            raise ValueError(f"{self.status.name} samples carry no verdict, got {self.verdict}")
        if (self.failure is not None) != (self.status is Status.FAILED):
            raise ValueError(
                f"exactly FAILED samples carry a failure, got {self.status.name}, {self.failure}"
            )
        if self.unjudged and not (self.status is Status.ABORTED and tokens):
            raise ValueError(
                f"only an ABORTED sample with an answer can be unjudged, got {self.status.name} "
                f"with {self.policy_tokens} tokens"
            )

    @property
    def uid(self) -> str:
        """Its name: task, prompt, visit and index."""
        return f"{self.task}/{self.prompt.uid}/{self.visit}/{self.index}"

    @property
    def reward(self) -> float | None:
        """The verdict's score; `None` without a verdict."""
        return None if self.verdict is None else self.verdict.score

    @property
    def text(self) -> str:
        """What the policy wrote, all turns joined; tool and environment text is not in it."""
        return "".join(turn.text or "" for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """Whether a cap or a limit cut it: of the sample, or of any of its turns."""
        if self.finish_reason in _CUT:
            return True
        for turn in self.turns:  # noqa: SIM110 - asked of every sample: a generator costs more than its turns
            if turn.finish_reason in _CUT:
                return True
        return False

    def lag(self, version: int) -> int:
        """Versions between the oldest trainable token and `version`; 0 without a trainable token."""
        oldest = self.oldest_version
        return 0 if oldest is None else version - oldest

    def trained_from(self, version: int) -> Sample:
        """Returns the sample with tokens of older versions masked; itself if it has none that are trained."""
        if self.oldest_version is None or self.oldest_version >= version:
            return self
        return evolve(
            self,
            segments=tuple(
                evolve(s, trained_from=max(s.trained_from, version)) for s in self.segments
            ),
        )


_CUT = frozenset({"length", "timeout"})
_NEVER_JUDGED = frozenset({Status.INIT, Status.ABORTED, Status.EXPIRED, Status.FAILED})


@frozen(eq=False)
class Group:
    """The samples of one visit of a prompt.

    Attributes:
        task: Name of its task.
        prompt: What was asked.
        visit: Number of this visit within the task, counted from 0. `(task, visit)` names the group.
        samples: Its members, by index unless the task's `refine` put them in another order. Indexes may have gaps:
            members that left the group took theirs with them.
    """

    task: str
    prompt: Prompt = field(repr=lambda prompt: repr(prompt.uid))
    visit: int = field(validator=whole(0))
    samples: tuple[Sample, ...] = field(converter=_samples, repr=_count)

    def __attrs_post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"group {self.task}/{self.visit} needs at least one sample")
        for sample in self.samples:
            if not isinstance(sample, Sample):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"samples must be Sample objects, got {sample!r}")
            if sample.visit != self.visit or sample.task != self.task:
                raise ValueError(
                    f"a sample of {sample.task}/{sample.visit} in group {self.task}/{self.visit}"
                )
        if len({sample.index for sample in self.samples}) < len(self.samples):
            indexes = [sample.index for sample in self.samples]
            raise ValueError(
                f"group {self.task}/{self.visit} has two samples of one index: {indexes}"
            )

    @property
    def status(self) -> Status:
        """`COMPLETED` if every member is; else the worst status among them."""
        statuses = {sample.status for sample in self.samples}
        if len(statuses) == 1:
            return statuses.pop()
        return next(status for status in _GROUP_PRIORITY if status in statuses)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Each member's reward, by index; `None` without a verdict."""
        return tuple(sample.reward for sample in self.samples)

    @property
    def oldest_version(self) -> int | None:
        """The lowest version among the trainable tokens of its members; `None` without any."""
        versions = [sample.oldest_version for sample in self.samples]
        return min([v for v in versions if v is not None], default=None)

    def __len__(self) -> int:
        return len(self.samples)


@frozen(kw_only=True)
class BatchStatistics:
    """Figures of one batch, of one task or over all.

    The first part describes the groups in the batch; the second what happened since the batch before.

    Attributes:
        groups: Groups in the batch.
        asked: Groups that were its share; more than `groups` only in a short batch.
        samples: Samples in it.
        policy_tokens: Tokens that the policy sampled.
        masked_tokens: Of these, tokens that are not trained, because they have become too old.
        context_tokens: Tokens that something else put into the responses.
        longest_response: Tokens of the longest response.
        truncated: Samples that the cap cut.
        reward_mean: Mean reward; `None` without a verdict.
        reward_min: Lowest reward.
        reward_max: Highest reward.
        unscored: Samples without a verdict.
        zero_variance_share: Share of the groups whose rewards are all equal, so that they teach nothing.
        lag_histogram: How many samples had which lag.
        group_seconds_mean: Mean time from a group's start to its end, in seconds.
        group_seconds_p50: Median of it.
        group_seconds_p99: 99th percentile of it.
        ready: Groups that are ready for a later batch.
        waiting: Groups that wait to be drawn again.
        waiting_expired: Of these, groups that became too old; the others were cut.
        flight: Groups in flight.
        dropped: Groups dropped since the batch before, by reason.
        expired: Groups that became too old since then.
        redrawn: Groups that were drawn again since then.
        failed_samples: Samples that failed since then.
        filtered_samples: Samples of groups that `keep` let go since then.
        produced_samples: Samples that completed since then.
        produced_rewards: How many of these have a verdict.
        produced_reward_sum: Sum of their rewards; of groups too that a filter then dropped.
        produced_tokens: Tokens committed since then.
        tokens_late: Tokens that came after their attempt was given up.
        tokens_rejected: Tokens of unusable answers, or beyond a cap.
        tokens_expired: Tokens of members that were given up because they had become too old.
        tokens_discarded: Tokens that reached no sample: of failed requests, or past a stop string.
        resumed_turns: Turns that went on from a partial.
        restarted_turns: Times that a turn began again because its partial was discarded.
        unseen_turns: Attempts that were cut without a reply.
        replayed_turns: Turns that a loop which ran again was given from its journal.
        diverged: Rollouts whose loop asked for something else when it ran again.
        restarted: Rollouts that began anew because a tool did not do the same again.
        seconds: Time since the batch before, or since the engine began.
        pause_seconds: Of that, time that the gate was closed.
    """

    groups: int = 0
    asked: int = 0
    samples: int = 0
    policy_tokens: int = 0
    masked_tokens: int = 0
    context_tokens: int = 0
    longest_response: int = 0
    truncated: int = 0
    reward_mean: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    unscored: int = 0
    zero_variance_share: float | None = None
    lag_histogram: Mapping[int, int] = field(factory=dict[int, int])
    group_seconds_mean: float | None = None
    group_seconds_p50: float | None = None
    group_seconds_p99: float | None = None
    ready: int = 0
    waiting: int = 0
    waiting_expired: int = 0
    flight: int = 0
    dropped: Mapping[str, int] = field(factory=dict[str, int])
    expired: int = 0
    redrawn: int = 0
    failed_samples: int = 0
    filtered_samples: int = 0
    produced_samples: int = 0
    produced_rewards: int = 0
    produced_reward_sum: float = 0.0
    produced_tokens: int = 0
    tokens_late: int = 0
    tokens_rejected: int = 0
    tokens_expired: int = 0
    tokens_discarded: int = 0
    resumed_turns: int = 0
    restarted_turns: int = 0
    unseen_turns: int = 0
    replayed_turns: int = 0
    diverged: int = 0
    restarted: int = 0
    seconds: float = 0.0
    pause_seconds: float = 0.0

    @property
    def group_seconds_ratio(self) -> float | None:
        """The 99th percentile of a group's time over its median: how long the tail is; `None` without any."""
        p50, p99 = self.group_seconds_p50, self.group_seconds_p99
        return p99 / p50 if p50 and p99 is not None else None


@frozen(eq=False, kw_only=True)
class Batch:
    """Groups handed to the trainer.

    Attributes:
        index: Number of the batch, counted from 1.
        version: The policy's weight version when it was taken; lags count from it.
        groups: Completed groups only.
        tasks: Statistics of each task. Those of a batch that an engine hands over are worked out when they are first
            looked at: whoever waits for the batch does not wait for them.
        short: Whether it holds fewer groups than were asked for, because the prompts ended.
        again: Whether it was handed over before, by an engine from whose checkpoint this one was restored.
    """

    index: int
    version: int
    groups: tuple[Group, ...] = field(converter=_groups, repr=_count)
    tasks: Mapping[str, BatchStatistics] = field(repr=_names)
    _statistics: BatchStatistics | Callable[[], BatchStatistics] = field(
        alias="statistics", repr=False
    )
    short: bool = False
    again: bool = False

    @property
    def statistics(self) -> BatchStatistics:
        """Statistics over all tasks."""
        figures = self._statistics
        return figures if isinstance(figures, BatchStatistics) else figures()

    @property
    def samples(self) -> Iterator[Sample]:
        """All samples, group by group."""
        return (sample for group in self.groups for sample in group.samples)

    def __len__(self) -> int:
        return len(self.groups)

    def __reduce__(self) -> tuple[object, ...]:
        make = partial(
            type(self),
            index=self.index,
            version=self.version,
            groups=self.groups,
            tasks=dict(self.tasks),
            statistics=self.statistics,
            short=self.short,
            again=self.again,
        )
        return make, ()


@frozen(eq=False, kw_only=True, repr=False)
class EvalResult:
    """What an evaluation brought. Printing it gives a small table.

    Attributes:
        task: Name of what was evaluated.
        version: The policy's weight version when it began.
        groups: One for each prompt, in the order of the prompts; failed samples are in them.
        statistics: Figures of these groups. `dropped` counts those with a failed sample, by the first one's kind.
        versions: How many samples have tokens of which weight version. One version made all of them unless the
            evaluation went on through an update.
    """

    task: str
    version: int
    groups: tuple[Group, ...] = field(converter=_groups)
    statistics: BatchStatistics
    versions: Mapping[int, int]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples, prompt by prompt."""
        return tuple(sample for group in self.groups for sample in group.samples)

    @property
    def score(self) -> float | None:
        """Mean reward of the judged samples; `None` without any. Failures are no reward of 0, see `failures`."""
        return self.statistics.reward_mean

    @property
    def failures(self) -> Mapping[str, int]:
        """How many samples failed, by kind; they have no part in `score`."""
        return Counter(s.failure.kind for s in self.samples if s.failure is not None)

    @property
    def pinned(self) -> bool:
        """Whether the version that it began with made all of it."""
        return set(self.versions) <= {self.version}

    def __repr__(self) -> str:
        score = "no score" if self.score is None else f"score {self.score:.4g}"
        failed = sum(self.failures.values())
        versions = ", ".join(f"v{version}" for version in self.versions) or f"v{self.version}"
        return f"<EvalResult of {self.task!r}: {score}, {len(self.samples)} samples, {failed} failed, {versions}>"

    def __str__(self) -> str:
        figures = self.statistics
        score = "none" if self.score is None else f"{self.score:.4g}"
        judged = figures.samples - figures.unscored
        failures = ", ".join(f"{count} {kind}" for kind, count in self.failures.items())
        rows = {
            "task": self.task,
            "prompts": str(len(self.groups)),
            "samples": str(figures.samples),
            "score": f"{score} (mean of {judged})",
            "failed": failures or "0",
            "truncated": str(figures.truncated),
            "tokens": str(figures.policy_tokens),
            "seconds": f"{figures.seconds:.1f}",
            "versions": ", ".join(f"v{v}: {count}" for v, count in self.versions.items()),
        }
        return "\n".join(f"{name:<10} {value}" for name, value in rows.items())
