"""The group table: every visit of a prompt and where it stands. The one truth of the engine.

A row changes state in one plain method, never across an `await`:

    drawn -> FLIGHT -> READY                    (delivered: it leaves the table, and nobody asks it any more)
                    -> WAITING -> FLIGHT        (expired or aborted: drawn again before fresh prompts)
                    -> DROPPED(reason)

Streams and bells only say that something changed here. Invariants: I7 (drawn = delivered + ready + waiting +
dropped + flight), I8 (delivered at most once), I9 (nothing delivered lags more than its task allows).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from attrs import evolve, frozen

from ._buffer import ReplayBuffer
from ._capture import NO_TRIES, Place, Tries, Visit
from ._figures import GroupFigures
from ._journal import Journal
from ._lives import GroupRecord
from ._records import FailureKind, Group, Prompt, Sample, Status

__all__ = [
    "EXPIRED",
    "EXPIRED_RETRIES",
    "FILTERED",
    "NEWER",
    "RESTARTED",
    "GroupTable",
    "Row",
    "RowState",
    "TableNote",
]

EXPIRED_RETRIES = 3
"""How often a row that has become too old is drawn again; every retry has a bound."""

FILTERED = "filtered"
"""Why a group was dropped that the user's filter did not keep."""

EXPIRED = "expired"
"""Why a group was dropped that had become too old again and again."""

RESTARTED = "restarted"
"""Why a completed member left whose group had to be generated again as a whole."""

NEWER = "newer weights"
"""Why a member left that newer weights had made than those with which its engine was restored."""

OTHER = "other"
"""The reason in the place of those beyond the first `_REASONS`: users give them, and counters must not grow."""

_REASONS = 64


class RowState(Enum):
    """Where a group visit stands."""

    FLIGHT = "flight"
    READY = "ready"
    WAITING = "waiting"
    DROPPED = "dropped"


class Row:
    """One visit of one prompt.

    Attributes:
        prompt: What is asked.
        visit: Number of the visit in its task.
        state: Where it stands, in the table or when it left it.
        kept: Members of an earlier run that are still good, by index.
        unjudged: Members of an earlier run that lack their verdict only, by index.
        journals: What members that were cut have left behind, by index: they go on from there.
        record: What a group loop that was cut goes on from, if it can be replayed.
        group: The frozen members, once they have all ended.
        figures: Sums over them, once they are ready.
        expiries: How often it became too old.
        in_tail: Whether it is of a tail batch, until it has ended.
        restart: Why nothing of it is kept when it is drawn again; `None` if that is not so.
        seconds: Time from its start to its end, over all runs.
        tries: What it has used up, if it was cut.
        losses: How often what ran its group loop was lost, and this loop may be why.
    """

    __slots__ = (
        "expiries",
        "figures",
        "group",
        "in_tail",
        "journals",
        "kept",
        "losses",
        "prompt",
        "record",
        "restart",
        "seconds",
        "state",
        "tries",
        "unjudged",
        "visit",
    )

    def __init__(self, prompt: Prompt, visit: int) -> None:
        self.prompt = prompt
        self.visit = visit
        self.state = RowState.FLIGHT
        self.kept: dict[int, Sample] = {}
        self.unjudged: dict[int, Sample] = {}
        self.journals: Mapping[int, Journal] = {}
        self.record: GroupRecord | None = None
        self.group: Group | None = None
        self.expiries = 0
        self.in_tail = False
        self.restart: str | None = None
        self.seconds = 0.0
        self.tries = NO_TRIES
        self.losses = 0
        self.figures: GroupFigures

    @property
    def members(self) -> Group:
        """The frozen members; the row must have ended a run."""
        if self.group is None:
            raise RuntimeError(f"{self!r} has no frozen members")
        return self.group

    def succeeded(self, group: Group) -> Row:
        """The row that takes the place of one that was ready: a checkpoint may still have that one."""
        row = Row(self.prompt, self.visit)
        row.group, row.expiries, row.seconds = group, self.expiries, self.seconds
        return row

    @property
    def held(self) -> Sequence[Sample]:
        """The frozen members, and those that its loop keeps beside them; the row must have ended a run."""
        if self.record is None:
            return self.members.samples
        return [*self.members.samples, *[life.sample for life in self.record.others]]

    def __repr__(self) -> str:
        return f"<Row {self.prompt.uid!r} visit {self.visit}: {self.state.value}>"


class _Waiting(NamedTuple):
    """A row that waits, with what may change of it."""

    place: Place
    row: Row
    group: Group | None
    journals: Mapping[int, Journal]
    expiries: int
    seconds: float
    in_tail: bool
    restart: str | None
    tries: Tries
    record: GroupRecord | None


@frozen(eq=False)
class TableNote:
    """The rows of one task that wait, and its counters, at one moment: what a checkpoint needs of them.

    Attributes:
        counters: By name.
        ready: Rows that were ready. Nothing of them changes any more: another row takes their place.
        waiting: Rows that waited to be drawn again, in order.
    """

    counters: Mapping[str, Any]
    ready: Sequence[Row]
    waiting: Sequence[_Waiting]

    def visits(self) -> Iterator[Visit]:
        """The rows as they stood."""
        for row in self.ready:
            yield Visit(
                place="ready", group=row.members, expiries=row.expiries, seconds=row.seconds
            )
        for waiting in self.waiting:
            place, _, group, journals, expiries, seconds, in_tail, restart, tries, record = waiting
            assert group is not None
            yield Visit(
                place=place,
                group=group,
                journals=journals,
                expiries=expiries,
                seconds=seconds,
                in_tail=in_tail,
                restart=restart,
                tries=tries,
                record=record,
            )


_COUNTERS = (
    "drawn",
    "redrawn",
    "delivered",
    "expired",
    "filtered_samples",
    "delivered_tokens",
    "dropped_tokens",
    "expired_tokens",
    "members",
    "delivered_members",
    "dropped_members",
)
_COUNTERS_BY_REASON = ("dropped", "shrunk", "failures")


class GroupTable:
    """The rows of one task.

    Attributes:
        flight: Rows in flight, by visit.
        drawn: Visits so far.
        redrawn: Times a waiting row was drawn again.
        delivered: Visits delivered.
        dropped: Visits dropped, by reason.
        expired: Times a row became too old.
        filtered_samples: Members of rows that the user's filter did not keep.
        delivered_tokens: Policy tokens in delivered rows.
        dropped_tokens: Policy tokens in dropped rows and in members that were given up.
        expired_tokens: Of these, policy tokens of members that were given up when their row was drawn again.
        dropped_in_a_row: Reasons of the rows dropped since the last one became ready.
        failures_in_a_row: What the last failure among these said, by reason.
        tail: Rows of a tail batch that have not ended yet.
        members: Rollouts begun, or to begin, for the rows so far.
        delivered_members: Of these, members of delivered rows.
        dropped_members: Members of dropped rows.
        shrunk: Members that left their group before that, by reason.
        failures: Members that failed, by kind; those that were replaced too.
    """

    def __init__(
        self,
        task: str,
        *,
        max_staleness: int,
        retries: int,
        tail_batch: int | None = None,
        freshest_first: bool = False,
        restart_whole: bool = False,
        replays_groups: bool = False,
        max_token_lag: int | None = None,
    ) -> None:
        self.task = task
        self.flight: dict[int, Row] = {}
        self.drawn = 0
        self.redrawn = 0
        self.delivered = 0
        self.dropped: Counter[str] = Counter()
        self.expired = 0
        self.filtered_samples = 0
        self.delivered_tokens = 0
        self.dropped_tokens = 0
        self.expired_tokens = 0
        self.dropped_in_a_row: Counter[str] = Counter()
        self.failures_in_a_row: dict[str, str] = {}
        self.tail = 0
        self.members = 0
        self.delivered_members = 0
        self.dropped_members = 0
        self.shrunk: Counter[str] = Counter()
        self.failures: Counter[FailureKind] = Counter()
        self._restart_whole = restart_whole  # whether rows that are drawn again keep no member
        self._replays_groups = replays_groups  # but for those that their loop goes on with
        self._max_staleness = max_staleness
        self._max_token_lag = max_token_lag  # older tokens are masked; `None` masks none
        self._retries = retries  # of a row that has become too old
        self._ready_tokens = 0  # of the ready rows
        self._ready_members = 0
        self._buffer: ReplayBuffer[Row] = ReplayBuffer(
            tail_batch=tail_batch, freshest_first=freshest_first
        )

    @property
    def ready(self) -> int:
        """How many rows are ready."""
        return self._buffer.ready

    @property
    def waiting(self) -> int:
        """How many rows wait to be drawn again."""
        return self._buffer.waiting

    @property
    def waiting_expired(self) -> int:
        """How many of these became too old; the others were cut."""
        return self._buffer.expired

    @property
    def parked(self) -> Iterator[Row]:
        """Ready and waiting rows."""
        return iter(self._buffer)

    def draw(self, prompt: Prompt) -> Row:
        """Enters a fresh visit, in flight."""
        row = Row(prompt, self.drawn)
        self.drawn += 1
        self.flight[row.visit] = row
        return row

    def redraw(self, version: int, *, everything: bool = False) -> Row | None:
        """Puts a row that waits in flight again, expired ones first; `None` if none is due.

        Members that have left a journal behind go on from it. Others that are not complete, and those that have become
        too old, are given up: they start anew. So are all of a row that restarts whole.

        Args:
            version: The policy's weight version.
            everything: Whether expired rows that are held back for a tail batch are due too.
        """
        row = self._buffer.take_waiting(everything=everything)
        # Time went on while it waited: what had completed before it was cut may be too old now.
        while row is not None and self._has_expired(row, version) and not self._may_retry(row):
            row = self._buffer.take_waiting(everything=everything)
        if row is None:
            return None
        if row.record is not None:
            if self._goes_on(row, version):
                return self._put_in_flight(row)
            self._give_up_others(row)
        journals: dict[int, Journal] = {}
        for sample in self._aged(row, version):
            is_old = self._masked(sample, version).lag(version) > self._max_staleness
            journal = row.journals.get(sample.index)
            completed = sample.status is Status.COMPLETED
            if row.restart is not None:
                self.let_go(sample, row.restart)
            elif completed and not self._restart_whole:
                row.kept[sample.index] = sample
            elif sample.unjudged and not self._restart_whole:
                whole = evolve(sample, status=Status.COMPLETED, unjudged=False)
                row.unjudged[sample.index] = whole
            elif journal is not None and not is_old and not self._restart_whole:
                journals[sample.index] = journal
            else:
                # A pause cut it, and uses up no retry of its row.
                was_cut_and_is_old = sample.status is Status.ABORTED and is_old
                status = Status.EXPIRED if was_cut_and_is_old else sample.status
                self.let_go(sample, RESTARTED if completed else status.value)
                if status is Status.EXPIRED:
                    self.expired_tokens += sample.policy_tokens
        row.journals = journals
        if row.restart is not None:
            row.restart, row.tries = None, NO_TRIES
        return self._put_in_flight(row)

    def _put_in_flight(self, row: Row) -> Row:
        row.group = None
        row.state = RowState.FLIGHT
        self.flight[row.visit] = row
        self.redrawn += 1
        return row

    def _goes_on(self, row: Row, version: int) -> bool:
        """Whether a row's loop goes on from its record: it can, and no member has become too old."""
        if row.restart is not None or not self._replays_groups:
            return False
        return all(
            self._masked(sample, version).lag(version) <= self._max_staleness
            for sample in row.members.samples
        )

    def _give_up_others(self, row: Row) -> None:
        """Counts the members that its loop kept beside those of the group."""
        record, row.record = row.record, None
        for life in () if record is None else record.others:
            self.let_go(life.sample, life.left or row.restart or RESTARTED)

    def settle(
        self,
        row: Row,
        samples: Sequence[Sample],
        seconds: float,
        journals: Mapping[int, Journal] | None = None,
        tries: Tries = NO_TRIES,
        *,
        record: GroupRecord | None = None,
        cut: bool = False,
    ) -> str:
        """Ends a row's run, by what became of its members.

        All completed: ready. Any unfinished: waiting. Else one has failed, and the group is dropped.

        Args:
            row: The row.
            samples: Its members, by index.
            seconds: How long the run took.
            journals: What those of them that were cut have left behind, by index.
            tries: What it has used up; kept if it was cut.
            record: What a group loop that was cut goes on from, if it can be replayed.
            cut: Whether a group loop was cut: it waits, though every member may have ended.

        Returns:
            `"ready"`, `"waiting"`, or the reason it was dropped.
        """
        del self.flight[row.visit]
        self._leave_tail(row)
        row.kept, row.unjudged, row.journals, row.tries = {}, {}, {}, NO_TRIES
        row.record = record
        row.seconds += seconds
        row.group = group = Group(self.task, row.prompt, row.visit, samples)
        match Status.ABORTED if cut else group.status:
            case Status.COMPLETED:
                self.forgive()
                self._put(row, group)
                return "ready"
            case Status.FAILED:
                uid, failure = next((s.uid, s.failure) for s in samples if s.failure is not None)
                kind = failure.kind
                self.failures_in_a_row[kind] = f"{uid} ({kind}): {failure.message}"
                self._drop(row, kind)
                return kind
            case Status.FILTERED:
                self.filtered_samples += len(samples)
                self._drop(row, FILTERED)
                return FILTERED
            case _:
                row.state = RowState.WAITING
                if record is None:  # else it has them
                    row.journals, row.tries = journals or {}, tries
                self._buffer.wait_cut(row)
                return "waiting"

    def expire(self, version: int) -> int:
        """Masks tokens that are too old to train, and moves ready rows that lag too much to where they are drawn again.

        Members that are fresh enough are kept. One that has no token left to train has become too old.

        Returns:
            How many rows expired.
        """
        oldest = version - self._max_staleness
        if self._max_token_lag is not None:
            oldest = max(oldest, version - self._max_token_lag)
        count = 0
        for old in self._buffer.take_older(oldest):
            self._ready_tokens -= old.figures.policy_tokens
            self._ready_members -= old.figures.samples
            group = Group(self.task, old.prompt, old.visit, self._aged(old, version))
            row = old.succeeded(group)
            if group.status is Status.COMPLETED:  # masked, and fresh enough without what was
                self._put(row, group)
                continue
            count += 1
            if self._may_retry(row):
                row.state = RowState.WAITING
                self._buffer.wait_expired(row)
        for row in self._buffer.complete_tail():
            row.in_tail = True
            self.tail += 1
        return count

    def _put(self, row: Row, group: Group) -> None:
        """A row is ready. It is counted now, group by group: a batch is handed over without counting."""
        row.state = RowState.READY
        row.figures = figures = GroupFigures.of(group)
        self._ready_tokens += figures.policy_tokens
        self._ready_members += figures.samples
        self._buffer.put(row, group.oldest_version or 0, row.visit)

    def let_go(self, sample: Sample, reason: str) -> None:
        """Counts a member that left its group."""
        self.count_leaving(reason, sample.policy_tokens)

    def count_leaving(self, reason: str, tokens: int) -> None:
        """Counts a member with so many tokens that left its group."""
        if reason not in self.shrunk and len(self.shrunk) >= _REASONS:
            reason = OTHER
        self.shrunk[reason] += 1
        self.dropped_tokens += tokens

    def is_lost(self, row: Row, ended: Iterable[Sample], version: int) -> bool:
        """Whether a row in flight can't be delivered: a member is too old, and it may not expire once more."""
        return row.expiries >= self._retries and any(
            sample.status is Status.COMPLETED
            and self._aged_sample(sample, version).status is Status.EXPIRED
            for sample in ended
        )

    def take(self, count: int) -> list[Row]:
        """Delivers up to `count` ready rows, oldest first or freshest first."""
        rows = self._buffer.take(count)
        if self._buffer.ready:
            tokens = sum([row.figures.policy_tokens for row in rows])
            members = sum([row.figures.samples for row in rows])
        else:  # all of them, as mostly: whoever waits for the batch need not wait until each has been looked at
            tokens, members = self._ready_tokens, self._ready_members
        self._ready_tokens -= tokens
        self._ready_members -= members
        self.delivered_tokens += tokens
        self.delivered_members += members
        self.delivered += len(rows)
        return rows

    def forgive(self) -> None:
        """Starts counting anew how many rows were dropped in a row."""
        self.dropped_in_a_row.clear()
        self.failures_in_a_row.clear()

    def note(self) -> TableNote:
        """What there is of the rows that wait, for a checkpoint."""
        counters: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        for name in _COUNTERS_BY_REASON:
            counters[name] = dict(getattr(self, name))
        ready = (
            self._buffer.ready_rows()
        )  # a copy of lists: nothing is made for each of many thousand
        places: tuple[Place, ...] = ("held", "expired", "cut")
        waiting = [
            _Waiting(
                place,
                r,
                r.group,
                r.journals,
                r.expiries,
                r.seconds,
                r.in_tail,
                r.restart,
                r.tries,
                r.record,
            )
            for place, rows in zip(places, self._buffer.waiting_rows(), strict=True)
            for r in rows
        ]
        return TableNote(counters, ready, waiting)

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Goes on from the counters of a checkpoint."""
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        for name in _COUNTERS_BY_REASON:
            getattr(self, name).update(counters[name])

    def enter(self, visit: Visit, *, version: int) -> Row:
        """Enters a visit of a checkpoint; one that was in flight is in flight, and is to be settled.

        One with tokens of newer weights than `version` waits, and begins anew when it is drawn. So does one that was
        delivered: it is not, then.
        """
        row = Row(visit.group.prompt, visit.group.visit)
        row.group = visit.group
        row.journals = visit.journals
        row.expiries, row.seconds, row.restart = visit.expiries, visit.seconds, visit.restart
        row.tries, row.record = visit.tries, visit.record
        newest = visit.newest_version
        is_newer = newest is not None and newest > version
        if visit.place == "delivered":
            self.delivered -= 1
            self.delivered_members -= len(visit.group)
            self.delivered_tokens -= _tokens(row)
        if is_newer:
            row.restart = NEWER
        if visit.place == "flight" and not is_newer:
            self.flight[row.visit] = row
        elif visit.place in ("ready", "delivered") and not is_newer:
            self._put(row, visit.group)
        else:
            row.state = RowState.WAITING
            row.in_tail = visit.in_tail
            self.tail += row.in_tail
            self._wait(row, visit.place)
        return row

    def _wait(self, row: Row, place: Place) -> None:
        match place:
            case "expired":
                self._buffer.wait_again(row)
            case "held":
                self._buffer.wait_expired(row)
            case _:
                self._buffer.wait_cut(row)

    def balance(self) -> None:
        """Checks I7.

        Raises:
            AssertionError: The figures; something was lost or doubled.
        """
        dropped = self.dropped.total()
        held = self.delivered + self.ready + self.waiting + dropped + len(self.flight)
        if self.drawn != held:
            raise AssertionError(
                f"I7: task {self.task!r} drew {self.drawn}, but delivered {self.delivered} + ready "
                f"{self.ready} + waiting {self.waiting} + dropped {dropped} + flight {len(self.flight)}"
            )

    def _drop(self, row: Row, reason: str) -> None:
        row.state = RowState.DROPPED
        self._give_up_others(row)
        self.dropped[reason] += 1
        self.dropped_in_a_row[reason] += 1
        self.dropped_tokens += _tokens(row)
        self.dropped_members += len(row.members)

    def _has_expired(self, row: Row, version: int) -> bool:
        """Whether a row became too old while it waited; one that expired before counts once."""
        before = [sample.status for sample in row.members.samples]
        after = [sample.status for sample in self._aged(row, version)]
        return Status.EXPIRED in after and Status.EXPIRED not in before

    def _may_retry(self, row: Row) -> bool:
        """Counts that a row became too old; drops it if that happened too often."""
        row.expiries += 1
        self.expired += 1
        if row.expiries <= self._retries:
            return True
        self._drop(row, EXPIRED)
        return False

    def _leave_tail(self, row: Row) -> None:
        self.tail -= row.in_tail
        row.in_tail = False

    def _aged(self, row: Row, version: int) -> list[Sample]:
        """A row's members as they are at a version: old tokens masked, or EXPIRED."""
        return [
            self._aged_sample(sample, version)
            if sample.status is Status.COMPLETED or sample.unjudged
            else sample
            for sample in row.members.samples
        ]

    def _masked(self, sample: Sample, version: int) -> Sample:
        if self._max_token_lag is None:
            return sample
        return sample.trained_from(version - self._max_token_lag)

    def _aged_sample(self, sample: Sample, version: int) -> Sample:
        sample = self._masked(sample, version)
        if sample.oldest_version is not None and sample.lag(version) <= self._max_staleness:
            return sample
        return evolve(sample, status=Status.EXPIRED, verdict=None, unjudged=False)

    def __repr__(self) -> str:
        return (
            f"<GroupTable {self.task!r}: drawn {self.drawn}, flight {len(self.flight)}, ready {self.ready}, "
            f"waiting {self.waiting}, delivered {self.delivered}, dropped {self.dropped.total()}>"
        )


def _tokens(row: Row) -> int:
    return sum(sample.policy_tokens for sample in row.members.samples)
