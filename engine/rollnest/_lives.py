"""The members of a group whose loop generates it as a whole and can be replayed.

Such a loop decides who runs, who is resampled and who leaves, and decides it again when it runs again. So every member
that there ever was is kept until the group is over, those that have left too: a life. Each is known by its index and
its place: how many members had left whose place it took. When the loop comes by a life again, the rollout is given
what is in its journal, and if it comes out as it did before, it ends as it did before: it isn't judged again, and not
counted again. A life that the loop does not come by any more is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from attrs import evolve, field, frozen

from ._journal import Journal
from ._records import Sample, Status
from ._response import Response

__all__ = ["DIVERGED", "GroupRecord", "Life", "Lives", "LivesNote", "as_it_was"]

DIVERGED = "diverged"
"""Why a member left that its group loop did not come by when it ran again."""

Key: TypeAlias = "tuple[int, int]"
"""Index and place."""


@frozen(eq=False, kw_only=True)
class Life:
    """One member, as far as it came.

    Attributes:
        sample: How it ended; ABORTED if it had not.
        place: How many members had left whose place in the group it took.
        journal: What its rollout is given again; `None` if that is nothing.
        left: Why it left the group; `None` if it did not.
        member: Whether it is among the group's samples. Others have left, or are to come.
        told: Whether it had ended for good, and was counted.
    """

    sample: Sample
    place: int
    journal: Journal | None = field(default=None, repr=False)
    left: str | None = None
    member: bool = False
    told: bool = False

    @property
    def key(self) -> Key:
        """Tells it from the others of its group."""
        return self.sample.index, self.place


@frozen(eq=False)
class GroupRecord:
    """What a group that was cut leaves behind for its loop to run again.

    Attributes:
        lives: Every member that there was.
        judged: What the judger of whole groups has said, each time that it was asked.
    """

    lives: Sequence[Life]
    judged: Sequence[Sequence[Sample]] = ()

    def __attrs_post_init__(self) -> None:
        keys = [life.key for life in self.lives]
        if len(set(keys)) < len(keys):
            raise ValueError(f"members must have places of their own, got {sorted(keys)}")

    @property
    def others(self) -> list[Life]:
        """Those that are not among the group's samples."""
        return [life for life in self.lives if not life.member]


def as_it_was(sample: Sample, life: Life | None) -> Sample:
    """Returns how a life ended before, if it holds the same now.

    Args:
        sample: What it came to this time.
        life: What is recorded of it.
    """
    if life is None:
        return sample
    before = life.sample
    if before.status not in (Status.COMPLETED, Status.FAILED) or sample.verdict is not None:
        return sample
    if sample.status is Status.COMPLETED:
        judged = before.failure is None or before.failure.kind == "judge"
        if not judged or sample.finish_reason != before.finish_reason:
            return sample
    elif sample.status is Status.FAILED and before.status is not Status.FAILED:
        return sample
    return before if _holds_the_same(sample, before) else sample


def _holds_the_same(one: Sample, other: Sample) -> bool:
    if one is other:
        return True
    turns = [
        [(turn.segment, turn.start, turn.stop, turn.finish_reason) for turn in sample.turns]
        for sample in (one, other)
    ]
    if turns[0] != turns[1]:
        return False
    if one.status is Status.ABORTED:  # its loop has not come to what it appends after the last turn
        return _with_turns(one) == _with_turns(other)
    return [(s.prompt_ids, s.response) for s in one.segments] == [
        (s.prompt_ids, s.response) for s in other.segments
    ]


def _with_turns(sample: Sample) -> list[tuple[memoryview[int], Response]]:
    return [
        (segment.prompt_ids, segment.response.without_trailing_context())
        for segment in sample.segments
        if segment.response.policy_tokens
    ]


class Lives:
    """The lives of a group while its loop runs.

    Attributes:
        left: Those that have left in this run, in order.
        judged: What the judger of whole groups has said in this run, and said again.
    """

    __slots__ = ("_begun", "_forgotten", "_judged", "_recorded", "judged", "left")

    def __init__(self, record: GroupRecord | None) -> None:
        lives = () if record is None else record.lives
        self.left: dict[Key, Life] = {}
        self.judged: list[Sequence[Sample]] = []
        self._recorded: dict[Key, Life] = {life.key: life for life in lives}
        self._begun: set[Key] = set()  # of the recorded ones, those that the loop has come by
        self._forgotten: set[Key] = set()  # of these, those of which nothing holds
        self._judged = deque(() if record is None else record.judged)

    def is_known(self, index: int, place: int) -> bool:
        """Whether a life is in the books already."""
        return (index, place) in self._recorded

    def recorded(self, index: int, place: int) -> Life | None:
        """What is recorded of a life, if it holds."""
        key = index, place
        return None if key in self._forgotten else self._recorded.get(key)

    def begin(self, index: int, place: int) -> Journal | None:
        """A life begins, perhaps again; returns what its rollout is given again."""
        life = self.recorded(index, place)
        if life is None:
            return None
        self._begun.add(life.key)
        return life.journal

    def forget(self, index: int, place: int) -> None:
        """Nothing that is recorded of a life holds any more."""
        self._forgotten.add((index, place))

    def is_told(self, sample: Sample, place: int) -> bool:
        """Whether a life has ended so before, and was counted then."""
        life = self.recorded(sample.index, place)
        return life is not None and life.told and _holds_the_same(sample, life.sample)

    def leave(self, life: Life) -> None:
        """A life leaves the group."""
        self.left[life.key] = life

    def judged_before(self, members: Sequence[Sample]) -> Sequence[Sample] | None:
        """What the judger of whole groups said of these, if that is what it was asked next."""
        if not self._judged:
            return None
        said = self._judged.popleft()
        if len(said) == len(members) and all(map(_holds_the_same, said, members)):
            self.judged.append(said)
            return said
        self._judged.clear()
        return None

    @property
    def to_come(self) -> list[Life]:
        """Recorded lives that the loop has not come by."""
        return [life for key, life in self._recorded.items() if key not in self._begun]

    @property
    def seeds(self) -> Mapping[Key, int]:
        """Of recorded lives, the seeds of their random generators."""
        journals = [(key, life.journal) for key, life in self._recorded.items()]
        return {key: journal.seed for key, journal in journals if journal is not None}

    @property
    def hidden_tokens(self) -> int:
        """Tokens of lives that have left or are to come."""
        hidden = [*self.left.values(), *self.to_come]
        return sum([life.sample.policy_tokens for life in hidden])

    def count(self, members: Iterable[Key]) -> int:
        """How many lives there are in all, with the group's members."""
        return len({*members, *self.left, *self._recorded})

    def record(self, members: Iterable[Life]) -> GroupRecord:
        """What the group leaves behind if it is cut now; its members as they are then."""
        lives = [*members, *self.left.values()]
        known = {life.key for life in lives}
        lives += [evolve(life, member=False) for life in self.to_come if life.key not in known]
        return GroupRecord(lives, [*self.judged, *self._judged])

    def note(self, ended: Mapping[int, Callable[[], Journal | None]]) -> LivesNote:
        """What there is of it now, for a checkpoint.

        Args:
            ended: Makes the journals of members that have ended, by index.
        """
        return LivesNote(
            ended=ended,
            recorded={k: life for k, life in self._recorded.items() if k not in self._forgotten},
            others=[*self.left.values(), *self.to_come],
            judged=[*self.judged, *self._judged],
        )

    def __repr__(self) -> str:
        return f"<Lives: {len(self._recorded)} recorded, {len(self._begun)} of them begun>"


@frozen(eq=False, kw_only=True)
class LivesNote:
    """Lives at one moment.

    Attributes:
        ended: Makes the journals of members that had ended, by index.
        recorded: What was recorded of lives, and still held.
        others: Lives that had left, or were to come.
        judged: What the judger of whole groups had said.
    """

    ended: Mapping[int, Callable[[], Journal | None]]
    recorded: Mapping[Key, Life]
    others: Sequence[Life]
    judged: Sequence[Sequence[Sample]]

    def record(self, members: Iterable[Life]) -> GroupRecord:
        """What would be left behind; its members as they would be if they had been cut."""
        lives = list(members)
        known = {life.key for life in lives}
        lives += [evolve(life, member=False) for life in self.others if life.key not in known]
        return GroupRecord(lives, self.judged)
