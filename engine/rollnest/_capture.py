"""What is noted of live rollouts for a checkpoint, and what it comes to.

Noting is done in one step on the event loop, and so it does as little as can be. Columns are not copied: they only
grow, so how long they were says what there was, whenever it is read. What a rollout would leave behind if it were cut
at that moment is worked out from the note later, in a thread: a sample that was aborted, and the journal that its loop
goes on from. The rollout itself goes on meanwhile, and nothing of it has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from attrs import define, evolve, field, frozen

from ._attempt import FinishReason
from ._journal import Journal, RecordedCall, RecordedTurn, Request
from ._lives import GroupRecord, Life, LivesNote, as_it_was
from ._options import Sampling
from ._records import Failure, FailureKind, Group, Prompt, Sample, Segment, Status, Turn
from ._response import Response

__all__ = [
    "NO_TRIES",
    "REDUNDANT",
    "ContextNote",
    "GroupNote",
    "Place",
    "RolloutNote",
    "RunningTurn",
    "Tries",
    "Visit",
    "play_later",
    "who_leaves",
    "within",
]

Place: TypeAlias = Literal["flight", "ready", "expired", "held", "cut", "delivered"]
"""Where a visit stood. `"expired"`, `"held"` and `"cut"` wait to be drawn again; `"held"` for a tail batch."""

REDUNDANT = "redundant"
"""Why a member left of which the group had enough without it."""


@frozen
class Tries:
    """What a group that was cut has used up: it goes on with what is left.

    Attributes:
        places: How many members had left whose place a member took, by index.
        failures: How often a failure was made up for by another try, by index and kind; -1 is the whole group's.
        gone: Indexes of members that left for good.
    """

    places: Mapping[int, int] = field(factory=dict[int, int])
    failures: Mapping[tuple[int, FailureKind], int] = field(
        factory=dict["tuple[int, FailureKind]", int]
    )
    gone: frozenset[int] = frozenset()


NO_TRIES = Tries()


@define(eq=False)
class RunningTurn:
    """A turn that had not ended.

    Attributes:
        asked: Its number among the rollout's calls, and what the loop said of it.
        start: Where it starts in the response.
        stop: How far it had come.
        tries: Requests so far.
        finish_reason: What the server had said of its end.
        min_tokens: Fewest tokens that it samples before it may stop.
        stops: Ids that end it.
    """

    asked: tuple[int, Request]
    start: int
    stop: int
    tries: int
    finish_reason: FinishReason | None = None
    min_tokens: int = 0
    stops: Sequence[Collection[int]] = ()

    def turn(self, segment: int, response: Response) -> Turn:
        """The turn as it is; one that is cut goes on from there."""
        reason = self.finish_reason
        outcome: Literal["stop", "length", "abort"] = "abort"
        if reason is FinishReason.STOP:
            outcome = "stop"
        elif reason is FinishReason.LENGTH:
            outcome = "length"
        elif self.stop - self.start >= self.min_tokens:
            last = response.ids[self.stop - 1]
            outcome = "stop" if any(last in stops for stops in self.stops) else "abort"
        return Turn(outcome, None, segment, self.start, self.stop, max(1, self.tries), response)


@define(eq=False)
class ContextNote:
    """One token context.

    Attributes:
        prompt_ids: What it began with.
        response: Its columns; they may have grown since.
        length: How many tokens there were.
        received: What the running attempt had brought; it may have grown since.
        received_length: How many tokens there were, without those that are not to be kept.
        running: The turn that had not ended.
        recorded: Turns that it had not been given again yet; they are in `response`.
    """

    prompt_ids: memoryview[int]
    response: Response
    length: int
    received: Response | None = None
    received_length: int = 0
    running: RunningTurn | None = None
    recorded: Sequence[RecordedTurn] = ()

    def columns(self) -> Response:
        """All columns, sealed."""
        response = self.response
        if self.received is not None and self.received_length:
            whole = Response()
            whole.extend(response[: self.length])
            whole.extend(self.received[: self.received_length])
            return whole.seal()
        if response.sealed and len(response) == self.length:
            return response  # a journal may have it too, and then both stay one
        return response[: self.length]


@define(eq=False, kw_only=True)
class RolloutNote:
    """One rollout that had not ended.

    Attributes:
        index: Its place in the group.
        seconds: Since its loop began.
        finish_reason: Why its loop ended it, if it did.
        contexts: Its contexts, in the order they were opened.
        turns: What the policy was asked for.
        asked: Number and request of each of these.
        calls: Calls of tools and of the judger.
        seed: Of its random generator.
        attempts: Requests so far.
        place: How many members had left whose place it took.
        cut: Whether its budget had ended it.
        discarded: Tokens that are not kept.
        unseen: Requests that had brought nothing.
        restarts: Whether nothing of it holds, because a tool did not do the same again.
    """

    index: int
    seconds: float = 0.0
    finish_reason: str | None = None
    contexts: Sequence[ContextNote] = ()
    turns: Sequence[Turn] = ()
    asked: Sequence[tuple[int, Request]] = ()
    calls: Iterable[RecordedCall] = ()
    seed: int = 0
    attempts: int = 0
    place: int = 0
    cut: bool = False
    discarded: int = 0
    unseen: int = 0
    restarts: bool = False

    def aborted(self, group: GroupNote) -> tuple[Sample, Journal | None]:
        """What it would leave behind; it is a member of the group."""
        if self.restarts:
            return self._sample(group, (), ()), None
        responses = [context.columns() for context in self.contexts]
        turns, asked = list(self.turns), list(self.asked)
        for index, (context, response) in enumerate(zip(self.contexts, responses, strict=True)):
            running = context.running
            if running is not None and running.stop > running.start:
                turns.append(running.turn(index, response))
                asked.append(running.asked)
            for recorded in context.recorded:
                turns.append(evolve(recorded.turn, segment=index, response=response))
                asked.append((recorded.begun, recorded.request))
        segments = tuple(
            Segment(c.prompt_ids, r.without_trailing_context() if self.cut else r)
            for c, r in zip(self.contexts, responses, strict=True)
        )
        sample = self._sample(group, segments, turns)
        journal = Journal.of(
            sample, asked, self.calls, seed=self.seed, attempts=self.attempts, place=self.place
        )
        return sample, None if journal.is_empty else journal

    def _sample(
        self, group: GroupNote, segments: tuple[Segment, ...], turns: Sequence[Turn]
    ) -> Sample:
        reason = self.finish_reason
        if self.cut:
            reason = "length"
        elif reason is None and turns:
            reason = turns[-1].finish_reason
        return Sample(
            task=group.task,
            prompt=group.prompt,
            visit=group.visit,
            index=self.index,
            status=Status.ABORTED,
            segments=segments,
            turns=tuple(within(turn, segments[turn.segment]) for turn in turns),
            finish_reason=reason,
            sampling=group.sampling,
            logprobs_mode=group.logprobs_mode,
            generate_seconds=self.seconds,
        )


def play_later(note: RolloutNote, journal: Journal) -> RolloutNote:
    """Completes the note of a rollout that has not begun again: all that it is given again is in the journal."""
    # Context that no turn has followed is not in a rollout that is cut while it is given its journal, either.
    note.contexts = [
        ContextNote(c.prompt_ids, c.response, c.end, recorded=c.turns)
        for number, c in enumerate(journal.contexts)
        if c.turns or not number
    ]
    note.calls = journal.calls
    note.seed, note.attempts, note.place = journal.seed, journal.attempts, journal.place
    return note


@frozen(eq=False, kw_only=True)
class Visit:
    """One visit of a prompt, as it stands in a checkpoint.

    Attributes:
        place: Where it stood.
        group: Its members: those that had not ended as they would be if they had been cut.
        journals: What those left behind, by index.
        seconds: Time from its start, over all runs.
        expiries: How often it had become too old.
        in_tail: Whether it was of a tail batch.
        restart: Why nothing of it is to be kept when it is drawn again; `None` if that is not so.
        batch: Number of the batch that it was delivered in.
        counted: Of a group in flight, indexes of completed members that count as produced already.
        left: Of a group in flight, why members would have left it, and their tokens.
        discarded: Tokens that are not kept.
        unseen: Requests that had brought nothing.
        restarted: Members that begin anew because a tool did not do the same again.
        tries: What it has used up, if it was cut.
        record: What a group loop that was cut goes on from, if it can be replayed.
    """

    place: Place
    group: Group
    journals: Mapping[int, Journal] = field(factory=dict[int, Journal])
    seconds: float = 0.0
    expiries: int = 0
    in_tail: bool = False
    restart: str | None = None
    batch: int | None = None
    counted: frozenset[int] = frozenset()
    left: tuple[tuple[str, int], ...] = ()
    discarded: int = 0
    unseen: int = 0
    restarted: int = 0
    tries: Tries = NO_TRIES
    record: GroupRecord | None = None

    @property
    def newest_version(self) -> int | None:
        """The highest weight version among its tokens; `None` without any."""
        others = [] if self.record is None else [life.sample for life in self.record.others]
        versions = [
            segment.response.newest_version
            for sample in (*self.group.samples, *others)
            for segment in sample.segments
        ]
        return max([v for v in versions if v is not None], default=None)


@define(eq=False, kw_only=True)
class GroupNote:
    """A group in flight.

    Attributes:
        task: Name of its task.
        prompt: What is asked.
        visit: Number of the visit.
        sampling: The task's sampling.
        logprobs_mode: What logprobs are.
        samples: Members that had ended, by index, in the order in which they did.
        by_group: Whether those of them that have no verdict wait to be judged with the others.
        unjudged: Members that were being judged, by index.
        live: Members that had not ended.
        group_size: How many members make a group.
        least: How many make one if some have failed.
        whole: Whether its loop begins anew as a whole.
        counted: Completed members that count as produced already, by index.
        seconds: Time from its start, over all runs.
        expiries: How often it had become too old.
        tries: What it had used up.
        lives: Of a group loop that can be replayed, all members that there were; else `None`.
    """

    task: str
    prompt: Prompt
    visit: int
    sampling: Sampling
    logprobs_mode: Literal["raw", "processed"]
    samples: Mapping[int, Sample]
    by_group: bool
    unjudged: Mapping[int, Sample]
    live: Sequence[RolloutNote]
    group_size: int
    least: int
    whole: bool
    counted: Iterable[int]
    seconds: float
    expiries: int
    tries: Tries
    lives: LivesNote | None = None

    def cut(self) -> Visit:
        """What would be left of it if it were cut."""
        samples: dict[int, Sample] = {}
        journals: dict[int, Journal] = {}
        for index, sample in self.samples.items():
            completed = sample.status is Status.COMPLETED
            waits = self.by_group and completed and sample.verdict is None
            samples[index] = _unjudged(sample) if waits else sample
        for index, sample in self.unjudged.items():
            samples.setdefault(index, _unjudged(sample))
        for note in self.live:
            sample, journal = note.aborted(self)
            samples[sample.index] = sample
            if journal is not None:
                journals[sample.index] = journal
        left: list[tuple[str, int]] = []
        tries = self.tries
        record = None
        if self.lives is not None:
            record = self._record(self.lives, samples, journals)
            tries, journals = NO_TRIES, {}
        elif self.whole:
            tries = NO_TRIES
            samples = {index: _begins_anew(sample) for index, sample in samples.items()}
            journals = {}
        else:
            for index, reason in who_leaves(samples, self.group_size, self.least).items():
                left.append((reason, samples.pop(index).policy_tokens))
                journals.pop(index, None)
                tries = evolve(tries, gone=tries.gone | {index})
        return Visit(
            place="flight",
            group=Group(self.task, self.prompt, self.visit, [samples[i] for i in sorted(samples)]),
            journals=journals,
            seconds=self.seconds,
            expiries=self.expiries,
            counted=frozenset(self.counted),
            left=tuple(left),
            discarded=sum([note.discarded for note in self.live]),
            unseen=sum([note.unseen for note in self.live]),
            restarted=sum([note.restarts for note in self.live]),
            tries=tries,
            record=record,
        )

    def _record(
        self, lives: LivesNote, samples: dict[int, Sample], journals: Mapping[int, Journal]
    ) -> GroupRecord:
        """What the group's loop would go on from; members that came out as before end as before."""
        members: list[Life] = []
        for index in sorted(samples):
            place = self.tries.places.get(index, 0)
            samples[index] = sample = as_it_was(samples[index], lives.recorded.get((index, place)))
            ended = lives.ended.get(index)
            members.append(
                Life(
                    sample=sample,
                    place=place,
                    journal=journals.get(index) if ended is None else ended(),
                    member=True,
                    told=sample.status in (Status.COMPLETED, Status.FAILED),
                )
            )
        return lives.record(members)


def who_leaves(samples: Mapping[int, Sample], group_size: int, least: int) -> dict[int, str]:
    """Says which members leave a group that has ended: who is not needed in a full one, or the dead, if it can do
    without them.

    Args:
        samples: All members, in the order in which they ended.
        group_size: How many make a group.
        least: How many make one if some have failed.

    Returns:
        Why each of them leaves, by index.
    """
    completed = [i for i, sample in samples.items() if sample.status is Status.COMPLETED]
    dead = {i: sample.failure.kind for i, sample in samples.items() if sample.failure is not None}
    if len(completed) >= group_size and len(samples) > group_size:
        return {i: dead.get(i, REDUNDANT) for i in samples if i not in completed[:group_size]}
    if dead and len(samples) - len(dead) >= least:
        return dict(dead)
    return {}


def _unjudged(sample: Sample) -> Sample:
    return evolve(sample, status=Status.ABORTED, unjudged=True)


def _begins_anew(sample: Sample) -> Sample:
    no_failure: Failure | None = None
    return evolve(sample, status=Status.ABORTED, verdict=None, failure=no_failure, unjudged=False)


def within(turn: Turn, segment: Segment) -> Turn:
    """An empty turn may stand behind context that was trimmed."""
    end = len(segment)
    return turn if turn.stop <= end else evolve(turn, start=min(turn.start, end), stop=end)
