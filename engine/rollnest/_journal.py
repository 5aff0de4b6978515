"""The journal of a rollout: what its loop asked for and was given, so that it can run again and be given the same.

A rollout that is cut leaves a `Journal` behind. When its loop runs again from the top, a `Replay` answers from it:
recorded turns and results of tools, as long as the loop asks for what it asked for before. Where it asks for something
else, or for more, it is on its own again: it goes on live.

Concurrent parts of a loop need not ask in the same order again. So nothing is kept in one list: turns are matched in
the order of their context, which is known by its prompt ids; calls in the order of the task that made them: the one
that runs the loop, or one that is known by what it calls. Every call has a number, given when it begins. If a part of
the loop asks for something else than it did, everything that began after its last answer is given up, in the other
parts too: what they did may have followed from it.

Appends, messages and draws are not in it. The loop makes them again, and they show in what is sent with the next turn:
that is compared token by token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from attrs import evolve, field, frozen

from ._attempt import TokenCounters
from ._codecs import Plain
from ._options import Sampling
from ._records import Sample, Turn, Verdict
from ._response import Response

__all__ = [
    "AS_THE_TASK",
    "MAIN",
    "CallKind",
    "CallLog",
    "ContextReplay",
    "Judged",
    "OnUnknown",
    "ToolReplay",
    "check_tool_options",
    "Journal",
    "Outcome",
    "Raised",
    "RecordedCall",
    "RecordedContext",
    "RecordedTurn",
    "Replay",
    "Request",
    "Returned",
]


@frozen
class Request:
    """What a loop said of one turn; `None` is the task's.

    Attributes:
        sampling: How to sample.
        max_tokens: The turn's cap.
    """

    sampling: Sampling | None = None
    max_tokens: int | None = None


AS_THE_TASK = Request()

MAIN = 0
"""The strand of the task that runs the loop."""


@frozen(eq=False)
class RecordedTurn:
    """One turn, as far as it came.

    Attributes:
        begun: Its number among the rollout's calls, given when it began.
        request: What the loop said of it.
        turn: What it brought. One with the finish reason `"abort"` was cut, and goes on from there.
    """

    begun: int
    request: Request
    turn: Turn


@frozen(eq=False)
class RecordedContext:
    """One token context with the turns in it.

    Attributes:
        prompt_ids: What it began with, int32.
        response: The columns after it.
        turns: Its turns that brought a token, in order; they do not overlap.
    """

    prompt_ids: memoryview[int] = field(repr=False)
    response: Response
    turns: tuple[RecordedTurn, ...] = field(repr=False)

    @property
    def end(self) -> int:
        """Where its last turn ends."""
        return self.turns[-1].turn.stop if self.turns else 0

    def __attrs_post_init__(self) -> None:
        end = begun = -1
        for recorded in self.turns:
            turn = recorded.turn
            if not (max(0, end) <= turn.start < turn.stop <= len(self.response)):
                raise ValueError(
                    f"a turn at {turn.start}:{turn.stop} of {len(self.response)} tokens, after one that ends at {end}"
                )
            if recorded.begun <= begun:
                raise ValueError(f"turn {recorded.begun} of a context comes after turn {begun}")
            end, begun = turn.stop, recorded.begun


@frozen
class Returned:
    """A tool's result."""

    value: Plain


@frozen
class Raised:
    """The text of the error that a tool or the judger ended with."""

    message: str


@frozen
class Judged:
    """The verdict that `judge()` returned."""

    verdict: Verdict


ToolReplay: TypeAlias = Literal["recorded", "rerun"]
"""What a tool call does when its loop runs again: give the recorded result, or run again."""

OnUnknown: TypeAlias = Literal["rerun", "fail"]
"""What a tool call does when its loop runs again and nobody knows whether it took effect."""

Outcome: TypeAlias = "Returned | Raised | Judged"
CallKind: TypeAlias = Literal["tool", "judge"]


@frozen
class RecordedCall:
    """One call of a tool, or of the task's judger.

    Attributes:
        begun: Its number among the rollout's calls, given when it began.
        strand: Tells the loop's tasks apart; calls of one task have one order. That of the task that runs the loop is
            `MAIN`.
        kind: What was called.
        name: The tool's name.
        given: A fingerprint of what it was given.
        outcome: How it ended; `None` if that is not known: it had begun when the rollout was cut.
    """

    begun: int
    strand: int
    kind: CallKind
    name: str
    given: str
    outcome: Outcome | None = None

    def asks_the_same(self, other: RecordedCall) -> bool:
        """Whether another call asks for the same."""
        return (self.kind, self.name, self.given) == (other.kind, other.name, other.given)


@frozen(eq=False, kw_only=True)
class Journal:
    """What a rollout that was cut leaves behind.

    Attributes:
        seed: The seed of its random generator: the same draws come again.
        attempts: Requests so far, so that no derived seed comes twice.
        place: How many members had left whose place in the group it took.
        contexts: Its token contexts, in the order they were opened.
        calls: Calls of tools and of the judger, in the order they began.
    """

    seed: int
    attempts: int
    place: int = 0
    contexts: tuple[RecordedContext, ...] = field(repr=lambda c: str(len(c)))
    calls: tuple[RecordedCall, ...] = field(repr=lambda c: str(len(c)))

    def __attrs_post_init__(self) -> None:
        numbers = self._numbers
        if len(set(numbers)) < len(numbers) or min(numbers, default=0) < 0:
            raise ValueError(f"calls must have numbers of their own, got {sorted(numbers)}")

    @classmethod
    def of(
        cls,
        sample: Sample,
        asked: Sequence[tuple[int, Request]],
        calls: Iterable[RecordedCall],
        *,
        seed: int,
        attempts: int,
        place: int = 0,
    ) -> Journal:
        """Makes the journal of a rollout that was cut; its columns are the sample's, not copied.

        Turns without a token are left out: they are made again, and bring nothing again.

        Args:
            sample: Its frozen end.
            asked: Number and request of each of the sample's turns.
            calls: Its calls.
            seed: The seed of its random generator.
            attempts: Requests so far.
            place: How many members had left whose place it took.
        """
        turns: list[list[RecordedTurn]] = [[] for _ in sample.segments]
        for turn, (number, request) in zip(sample.turns, asked, strict=True):
            if len(turn):
                turns[turn.segment].append(RecordedTurn(number, request, turn))
        return cls(
            seed=seed,
            attempts=attempts,
            place=place,
            contexts=tuple(
                RecordedContext(segment.prompt_ids, segment.response, tuple(turns_of))
                for segment, turns_of in zip(sample.segments, turns, strict=True)
            ),
            calls=tuple(sorted(calls, key=lambda call: call.begun)),
        )

    @property
    def next_number(self) -> int:
        """The number of the next call that is not recorded. So a call that left nothing behind gets its own again."""
        return 1 + max(self._numbers, default=-1)

    @property
    def _numbers(self) -> list[int]:
        turns = [turn.begun for context in self.contexts for turn in context.turns]
        return turns + [call.begun for call in self.calls]

    @property
    def policy_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum([len(t.turn) for context in self.contexts for t in context.turns])

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing that would have to be done again."""
        return not self.calls and not any(context.turns for context in self.contexts)


class ContextReplay:
    """What is left of one recorded context.

    Attributes:
        prompt_ids: What it began with.
        response: All its columns.
        turns: Turns that have not been given again yet.
    """

    def __init__(self, replay: Replay, recorded: RecordedContext) -> None:
        self.prompt_ids: memoryview[int] = recorded.prompt_ids
        self.response: Response = recorded.response
        self.turns: deque[RecordedTurn] = deque(recorded.turns)
        self._replay = replay
        self._at = 0  # the columns up to here have been given again
        self._after = (
            0  # what began from here on may have followed from what this context asks for next
        )

    @property
    def end(self) -> int:
        """Where its last turn ends that has not been given up."""
        return self.turns[-1].turn.stop if self.turns else self._at

    @property
    def pending_tokens(self) -> int:
        """Tokens of the policy that have not been given again yet."""
        return sum([len(recorded.turn) for recorded in self.turns])

    def opened(self, latest: int) -> None:
        """Says that it goes on now, when everything up to that number has been given again."""
        self._after = min(latest + 1, self.turns[0].begun if self.turns else latest + 1)

    def next_turn(self, response: Response, request: Request) -> RecordedTurn | None:
        """Takes the next turn, if the loop asks for it with the same tokens before it.

        If it asks for something else, the record is cut.

        Args:
            response: What the context holds now.
            request: What the loop says of the turn.

        Returns:
            The turn, or `None` if the loop is on its own here.
        """
        if not self.turns:
            return None
        recorded = self.turns[0]
        start = recorded.turn.start
        if recorded.request != request or not self._holds(response, start):
            self._replay.cut(self._after)
            return None
        self.turns.popleft()
        self._at = recorded.turn.stop
        self._after = recorded.begun + 1
        self._replay.gave(recorded)
        return recorded

    def discard(self, recorded: RecordedTurn) -> None:
        """Gives up a turn that has just been taken and had been cut; what began after it followed from it."""
        self._at = recorded.turn.start
        self._replay.discard(recorded)

    def drop_from(self, begun: int) -> int:
        """Gives up turns from this number on; returns how many tokens."""
        tokens = 0
        while self.turns and self.turns[-1].begun >= begun:
            tokens += len(self.turns.pop().turn)
        return tokens

    def leave(self) -> None:
        """Gives up what began after the last turn that was taken: it had been cut, and has gone on since."""
        if self.turns:
            self._replay.cut(self._after)

    def is_left_by(self, response: Response) -> bool:
        """Whether a response has gone on without the record: it has tokens of the policy that the record lacks."""
        return any(response.origin[self._at :])

    def _holds(self, response: Response, start: int) -> bool:
        """Whether a response is what the record holds up to `start`; it is up to where it was given again."""
        if len(response) != start:
            return False
        # What the policy has added on its own since is no context, though the ids may be the same.
        if self.is_left_by(response):
            return False
        return response.packed_ids[self._at :] == self.response.packed_ids[self._at : start]


class Replay:
    """Answers a loop that runs again, from what it asked for before.

    Attributes:
        journal: What it answers from.
        contexts: Contexts that the loop has not opened again yet.
    """

    def __init__(self, journal: Journal, counters: TokenCounters) -> None:
        self.journal: Journal = journal
        self.contexts: list[ContextReplay] = []
        self._opened: list[ContextReplay] = []
        self._strands: dict[int, deque[RecordedCall]] = {}
        self._latest = -1
        self._diverged = False
        self._counters = counters
        for recorded in journal.contexts:
            if recorded.turns:
                self.contexts.append(ContextReplay(self, recorded))
        for call in journal.calls:
            self._strands.setdefault(call.strand, deque()).append(call)

    @property
    def pending_tokens(self) -> int:
        """Tokens of the policy that are recorded and have not been given again yet."""
        return sum([c.pending_tokens for c in self._opened]) + self.unopened_tokens

    @property
    def unopened_tokens(self) -> int:
        """Of these, those of contexts that the loop has not opened again."""
        return sum([context.pending_tokens for context in self.contexts])

    @property
    def unopened_length(self) -> int:
        """Response tokens of contexts that the loop has not opened again."""
        return sum([context.end for context in self.contexts])

    @property
    def calls(self) -> list[RecordedCall]:
        """Calls that have not been given again yet, in the order they began."""
        left = [call for strand in self._strands.values() for call in strand]
        return sorted(left, key=lambda call: call.begun)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be given again."""
        return not any(self._strands.values()) and not any(
            context.turns for context in (*self.contexts, *self._opened)
        )

    def open(self, prompt_ids: memoryview[int]) -> ContextReplay | None:
        """Takes the record of a context that the loop opens with these ids; `None` if there is none."""
        for at, context in enumerate(self.contexts):
            if context.prompt_ids == prompt_ids:
                del self.contexts[at]
                context.opened(self._latest)
                self._opened.append(context)
                return context
        return None

    def call(self, asked: RecordedCall, strand: int | None) -> RecordedCall | None:
        """Takes the record of a call, if the task that makes it has its turn with it.

        If that task made another call at this point, the record is cut.

        Args:
            asked: The call as it would be recorded.
            strand: That of the task that makes it: `MAIN`, or known from an earlier call; `None` if it is its first.

        Returns:
            The recorded call, or `None` if the loop is on its own here.
        """
        heads = [calls[0] for calls in self._strands.values() if calls]
        # Its own strand first; then the others, since tasks that made the same call may have changed places.
        heads.sort(key=lambda head: (head.strand != strand, head.begun))
        for head in heads:
            if (head.strand == MAIN) == (strand == MAIN) and head.asks_the_same(asked):
                self._strands[head.strand].popleft()
                self.gave(head)
                return head
        own = None if strand is None else self._strands.get(strand)
        if own:
            self.cut(own[0].begun)
        return None

    def cut(self, begun: int) -> None:
        """Gives up whatever began from this number on and has not been given again."""
        calls = 0
        for strand in self._strands.values():
            while strand and strand[-1].begun >= begun:
                strand.pop()
                calls += 1
        tokens = sum([c.drop_from(begun) for c in (*self.contexts, *self._opened)])
        self.contexts = [context for context in self.contexts if context.turns]
        self._counters.discarded += tokens
        if (tokens or calls) and not self._diverged:
            self._diverged = True
            self._counters.diverged += 1

    def discard(self, recorded: RecordedTurn) -> None:
        """Gives up a turn that has just been taken, and what began after it."""
        self._counters.discarded += len(recorded.turn)
        self.cut(recorded.begun + 1)

    def end(self) -> None:
        """Lets go of what is left, so that no ring of objects stays behind."""
        self.contexts.clear()
        self._opened.clear()

    def gave(self, recorded: RecordedTurn | RecordedCall) -> None:
        """Notes what was given again."""
        self._latest = max(self._latest, recorded.begun)


def check_tool_options(replay: str, on_unknown: str) -> None:
    """Raises `ValueError` if an option of a tool call is none of those there are."""
    if replay not in ("recorded", "rerun"):
        raise ValueError(f"replay must be 'recorded' or 'rerun', got {replay!r}")
    if on_unknown not in ("rerun", "fail"):
        raise ValueError(f"on_unknown must be 'rerun' or 'fail', got {on_unknown!r}")


class CallLog:
    """The calls of tools and judgers that a running rollout has made.

    Attributes:
        calls: The calls, by number.
    """

    __slots__ = ("_next", "calls")

    def __init__(self, journal: Journal | None) -> None:
        self.calls: dict[int, RecordedCall] = {}
        known = () if journal is None else journal.calls
        self._next = 1 + max([call.strand for call in known], default=MAIN)

    def begin(
        self,
        number: int,
        strand: int | None,
        kind: CallKind,
        name: str,
        given: str,
        replay: Replay | None,
    ) -> RecordedCall:
        """Records that a call has begun.

        Args:
            number: Its number, if it was not recorded before.
            strand: That of the task that makes it: `MAIN`, or that of its last call; `None` if it is its first.
            kind: What is called.
            name: The tool's name.
            given: A fingerprint of what it is given.
            replay: What the rollout is given again from.

        Returns:
            The call. If it was recorded before, it is that one.
        """
        call = RecordedCall(number, self._next if strand is None else strand, kind, name, given)
        recorded = None if replay is None else replay.call(call, strand)
        if recorded is not None:
            call = recorded
        elif strand is None:
            self._next += 1
        self.calls[call.begun] = call
        return call

    def end(self, call: RecordedCall, outcome: Outcome) -> None:
        """Records how a call ended."""
        self.calls[call.begun] = evolve(call, outcome=outcome)
