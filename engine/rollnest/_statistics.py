"""Figures of batches and of the run. Counters only rise; a batch's figures are differences of two readings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter, sub
from typing import NamedTuple

from attrs import field, frozen

from ._attempt import TokenCounters
from ._records import BatchStatistics, FailureKind, Sample
from ._table import GroupTable, Row

__all__ = [
    "Described",
    "EngineStatistics",
    "Produced",
    "Reading",
    "Share",
    "TaskStatistics",
    "batch_statistics",
    "read",
    "share_of",
]


@frozen(kw_only=True)
class TaskStatistics:
    """Where the groups and tokens of one task are, since the engine began.

    `drawn == delivered + ready + waiting + flight + sum(dropped.values())`, always.

    Attributes:
        drawn: Prompt visits.
        redrawn: Times a waiting group was drawn again.
        delivered: Groups handed to the trainer.
        ready: Groups that wait for a batch.
        waiting: Groups that wait to be drawn again.
        flight: Groups in flight.
        held: Prompts that a `PromptSource` gave and that no group has taken yet; they are not counted as drawn.
        dropped: Groups dropped, by reason.
        expired: Times a group became too old.
        members: Rollouts begun, or to begin, for the visits drawn:
            `members == members_delivered + members_parked + members_live + members_dropped
            + sum(members_shrunk.values())`.
        members_delivered: Of these, in groups handed to the trainer.
        members_parked: In groups that are ready, or wait to be drawn again.
        members_live: In groups in flight.
        members_dropped: In dropped groups.
        members_shrunk: That left their group before it was delivered or dropped, by reason: the kind of their failure,
            `"retried"`, `"redundant"`, `"refined"`, `"resampled"`, `"expired"`, `"diverged"`, or what a group loop
            said.
        failures: Members that failed, by kind, those that were retried too.
        produced_samples: Samples that completed.
        tokens_committed: Tokens recorded in attempts.
        tokens_in_records: Of those, in samples: delivered, dropped (members that were given up too), ready, waiting
            and live ones.
        tokens_expired: Of these, in members that were given up because they had become too old.
        tokens_discarded: Of the committed ones, those that reached no sample: of failed requests, past a stop string,
            or of partials that were not to be kept.
        tokens_late: Tokens that came after their attempt was given up.
        tokens_rejected: Tokens of unusable answers, or beyond a cap.
        resumed_turns: Turns that went on from a partial.
        retries: Requests that were sent again because they failed for a reason that may pass.
        restarted_turns: Times that a turn began again because its partial was discarded.
        unseen_turns: Attempts that were cut without a reply.
        replayed_turns: Turns that a loop which ran again was given from its journal.
        diverged: Rollouts whose loop asked for something else when it ran again; the rest of their journal is among
            the discarded tokens.
        restarted: Rollouts that began anew because a tool did not do the same again.
    """

    drawn: int
    redrawn: int
    delivered: int
    ready: int
    waiting: int
    flight: int
    held: int = 0
    dropped: Mapping[str, int]
    expired: int
    members: int
    members_delivered: int
    members_parked: int
    members_live: int
    members_dropped: int
    members_shrunk: Mapping[str, int]
    failures: Mapping[FailureKind, int]
    produced_samples: int
    tokens_committed: int
    tokens_in_records: int
    tokens_expired: int
    tokens_discarded: int
    tokens_late: int
    tokens_rejected: int
    resumed_turns: int
    restarted_turns: int
    retries: int = 0
    unseen_turns: int
    replayed_turns: int = 0
    diverged: int = 0
    restarted: int = 0

    @property
    def tokens_lost(self) -> int:
        """Committed tokens that are nowhere; 0, or the engine has a bug."""
        return self.tokens_committed - self.tokens_in_records - self.tokens_discarded


@frozen(kw_only=True)
class EngineStatistics:
    """Where everything is, since the engine began.

    Attributes:
        version: The policy's weight version.
        batches: Batches delivered.
        turns_in_flight: Turns at the server now.
        pauses: How often the gate was closed.
        pause_seconds: Time it was closed, pauses that are over.
        outages: How often the policy's server was down.
        outage_seconds: Time it was down, outages that are over; pauses are not counted.
        failed_requests: Requests that failed for a reason that may pass.
        probe_tokens: Tokens of the requests that asked whether it works; they are in no record and no task's figures.
        evaluations: Evaluations that were asked for.
        evaluation_tokens: Tokens recorded in attempts of evaluations; they are in no task's figures.
        judge_tokens: Tokens that the policy made for judgers that asked it; they are in no task's figures.
        loop_lag_max: Seconds of the event loop's longest silence while groups were in flight; 0 under virtual time.
        abandoned_threads: Worker threads that nobody waits for any more and that still run.
        tasks: Figures of each task.
    """

    version: int
    batches: int
    turns_in_flight: int
    pauses: int
    pause_seconds: float
    outages: int = 0
    outage_seconds: float = 0.0
    failed_requests: int = 0
    probe_tokens: int = 0
    evaluations: int = 0
    evaluation_tokens: int = 0
    judge_tokens: int = 0
    loop_lag_max: float = 0.0
    abandoned_threads: int
    tasks: Mapping[str, TaskStatistics] = field(repr=False)

    def total(self, name: str) -> int:
        """Returns a figure of `TaskStatistics` summed over the tasks."""
        return sum(int(getattr(task, name)) for task in self.tasks.values())


class Produced:
    """Counts samples that completed, whatever becomes of their groups.

    Attributes:
        samples: How many.
        rewards: How many of them have a verdict.
        reward_sum: Sum of their rewards.
    """

    __slots__ = ("reward_sum", "rewards", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self.rewards = 0
        self.reward_sum = 0.0

    def restore(self, counts: Mapping[str, float]) -> None:
        """Goes on from the counts of a checkpoint."""
        self.samples = int(counts["samples"])
        self.rewards = int(counts["rewards"])
        self.reward_sum = counts["reward_sum"]

    def add(self, sample: Sample) -> None:
        """Counts one."""
        self.samples += 1
        reward = sample.reward
        if reward is not None:
            self.rewards += 1
            self.reward_sum += reward


class Reading(NamedTuple):
    """The counters that a batch's figures are differences of."""

    dropped: Mapping[str, int]
    expired: int
    redrawn: int
    filtered_samples: int
    tokens_expired: int
    failed_samples: int
    produced_samples: int
    produced_rewards: int
    produced_reward_sum: float
    produced_tokens: int
    tokens_late: int
    tokens_rejected: int
    tokens_discarded: int
    resumed_turns: int
    restarted_turns: int
    unseen_turns: int
    replayed_turns: int
    diverged: int
    restarted: int
    pause_seconds: float
    time: float


# In the order of `Reading`.
_OF_TABLE = attrgetter("expired", "redrawn", "filtered_samples", "expired_tokens")
_OF_PRODUCED = attrgetter("samples", "rewards", "reward_sum")
_OF_TOKENS = attrgetter(
    "committed",
    "late",
    "rejected",
    "discarded",
    "resumed_turns",
    "restarted_turns",
    "unseen_turns",
    "replayed_turns",
    "diverged",
    "restarted",
)


def read(
    table: GroupTable,
    tokens: TokenCounters,
    produced: Produced,
    pause_seconds: float,
    time: float,
) -> Reading:
    """Reads the counters of one task, at a time."""
    # Whoever waits for a batch waits for this too, and finds it cold: the less there is to run, the better.
    return Reading._make(
        (
            dict(table.dropped),
            *_OF_TABLE(table),
            table.failures.total(),
            *_OF_PRODUCED(produced),
            *_OF_TOKENS(tokens),
            pause_seconds,
            time,
        )
    )


# What a batch adds up over its groups, in one pass.
_ADDED = attrgetter(
    "samples",
    "policy_tokens",
    "masked_tokens",
    "response_tokens",
    "truncated",
    "rewards",
    "reward_sum",
)
_NOTHING = [0] * 7
_AGES = attrgetter("ages")


class Share(NamedTuple):
    """What a task gave to a batch, and how it stood when the batch was taken."""

    rows: Sequence[Row]
    asked: int
    ready: int
    waiting: int
    waiting_expired: int
    flight: int
    before: Reading
    now: Reading


def share_of(
    table: GroupTable, rows: Sequence[Row], asked: int, before: Reading, now: Reading
) -> Share:
    """What a table that holds `rows` no more gave, and what it holds still."""
    return Share(
        rows,
        asked,
        table.ready,
        table.waiting,
        table.waiting_expired,
        len(table.flight),
        before,
        now,
    )


class Described(Mapping[str, BatchStatistics]):
    """Statistics of the tasks of a batch, worked out when they are first looked at.

    Nothing that they follow from changes once the batch is taken, so it is all the same when that is, and in which
    thread.
    """

    __slots__ = ("_known", "_shares", "_version")

    def __init__(self, shares: Mapping[str, Share], version: int) -> None:
        self._shares = shares
        self._version = version
        self._known: dict[str | None, BatchStatistics] = {}

    def total(self) -> BatchStatistics:
        """Those over all tasks."""
        if len(self._shares) == 1:
            return self[next(iter(self._shares))]
        return self._look_up(None, list(self._shares.values()))

    def _look_up(self, key: str | None, shares: Sequence[Share]) -> BatchStatistics:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = batch_statistics(shares, self._version)
        return known

    def __getitem__(self, task: str) -> BatchStatistics:
        return self._look_up(task, [self._shares[task]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shares)

    def __len__(self) -> int:
        return len(self._shares)

    def __repr__(self) -> str:
        return repr(dict(self))


def batch_statistics(shares: Sequence[Share], version: int) -> BatchStatistics:
    """Describes groups of one or several tasks; over several, percentiles are of the union."""
    rows = [row for share in shares for row in share.rows]
    before = [share.before for share in shares]
    now = [share.now for share in shares]
    figures = [row.figures for row in rows]
    sums = [sum(column) for column in zip(*map(_ADDED, figures), strict=True)]
    samples, policy_tokens, masked_tokens, response_tokens, truncated, rewards, reward_sum = (
        sums or _NOTHING
    )
    lags: Counter[int] = Counter()
    for ages, groups in Counter(map(_AGES, figures)).items():
        for oldest, count in ages:
            lags[0 if oldest is None else version - oldest] += count * groups
    scored = figures if rewards else ()
    seconds = sorted([row.seconds for row in rows])
    if len(now) == 1:
        rises = map(sub, now[0][1:], before[0][1:])
    else:
        after = map(sum, zip(*[reading[1:] for reading in now], strict=True))
        earlier = map(sum, zip(*[reading[1:] for reading in before], strict=True))
        rises = map(sub, after, earlier)
    risen = Reading._make([_dropped(now, before), *rises])
    return BatchStatistics(
        groups=len(rows),
        asked=sum([share.asked for share in shares]),
        samples=samples,
        policy_tokens=policy_tokens,
        masked_tokens=masked_tokens,
        context_tokens=response_tokens - policy_tokens,
        longest_response=max([f.longest_response for f in figures], default=0),
        truncated=truncated,
        reward_mean=reward_sum / rewards if rewards else None,
        reward_min=min([f.reward_min for f in scored if f.reward_min is not None], default=None),
        reward_max=max([f.reward_max for f in scored if f.reward_max is not None], default=None),
        unscored=samples - rewards,
        zero_variance_share=(
            sum([f.has_no_spread for f in figures]) / len(figures) if rewards else None
        ),
        lag_histogram=dict(sorted(lags.items())),
        group_seconds_mean=sum(seconds) / len(seconds) if seconds else None,
        group_seconds_p50=_percentile(seconds, 0.5),
        group_seconds_p99=_percentile(seconds, 0.99),
        ready=sum([share.ready for share in shares]),
        waiting=sum([share.waiting for share in shares]),
        waiting_expired=sum([share.waiting_expired for share in shares]),
        flight=sum([share.flight for share in shares]),
        dropped=risen.dropped,
        expired=risen.expired,
        redrawn=risen.redrawn,
        failed_samples=risen.failed_samples,
        filtered_samples=risen.filtered_samples,
        produced_samples=risen.produced_samples,
        produced_rewards=risen.produced_rewards,
        produced_reward_sum=risen.produced_reward_sum,
        produced_tokens=risen.produced_tokens,
        tokens_late=risen.tokens_late,
        tokens_rejected=risen.tokens_rejected,
        tokens_expired=risen.tokens_expired,
        tokens_discarded=risen.tokens_discarded,
        resumed_turns=risen.resumed_turns,
        restarted_turns=risen.restarted_turns,
        unseen_turns=risen.unseen_turns,
        replayed_turns=risen.replayed_turns,
        diverged=risen.diverged,
        restarted=risen.restarted,
        # The clock and the gate are every task's: the union's time is that of any one.
        seconds=now[0].time - before[0].time,
        pause_seconds=now[0].pause_seconds - before[0].pause_seconds,
    )


def _dropped(now: Sequence[Reading], before: Sequence[Reading]) -> Mapping[str, int]:
    """Groups dropped in between, by reason."""
    if not any(reading.dropped for reading in now):
        return {}
    dropped: Counter[str] = Counter()
    for reading in now:
        dropped.update(reading.dropped)
    for reading in before:
        dropped.subtract(reading.dropped)
    return {reason: count for reason, count in dropped.items() if count}


def _percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank on sorted values; `None` without any."""
    return values[min(int(len(values) * share), len(values) - 1)] if values else None
