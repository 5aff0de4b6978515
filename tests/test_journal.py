"""Journals and what is answered from them, without an engine."""

from __future__ import annotations

import math
from array import array
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from typing import Any

import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from rollnest import Response, Sampling, Turn
from rollnest._attempt import TokenCounters
from rollnest._codecs import (
    Coded,
    decode,
    encode,
    fingerprint,
    register_codec,
    same,
    unrecordable_return,
)
from rollnest._journal import (
    AS_THE_TASK,
    MAIN,
    CallLog,
    ContextReplay,
    Journal,
    Raised,
    RecordedCall,
    RecordedContext,
    RecordedTurn,
    Replay,
    Request,
    Returned,
)
from rollnest.errors import LoopError

# Codecs

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=8,
)


@given(plain_values)
def test_what_is_encoded_is_decoded_with_its_types(value: Any) -> None:
    plain = encode(value, "f returned")
    again = decode(plain)
    assert type(again) is type(value)
    assert repr(again) == repr(value)
    assert same(plain, encode(again, "f returned"))


def test_a_result_is_copied() -> None:
    value: dict[str, Any] = {"rows": [1]}
    plain = encode(value, "f returned")
    value["rows"].append(2)
    again = decode(plain)
    assert again == {"rows": [1]}
    again["rows"].append(3)
    assert decode(plain) == {"rows": [1]}


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({1, 2}, "a set"),
        (Colour.RED, "a tests.test_journal.Colour"),
        ([{"k": object()}], "a object"),
        ({1: 2}, "a dict with the key 1"),
    ],
)
def test_what_no_journal_can_hold_is_refused(value: Any, says: str) -> None:
    with pytest.raises(LoopError, match=f"tool f returned {says}.*register_codec"):
        encode(value, "tool f returned")


def test_what_is_nested_too_deeply_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(LoopError, match="nested too deeply"):
        encode(value, "tool f returned")


@frozen
class Point:
    x: int
    y: int


def unpack(point: Point) -> list[int]:
    return [point.x, point.y]


def pack(pair: list[int]) -> Point:
    return Point(*pair)


def test_a_codec_keeps_any_type() -> None:
    register_codec(Point, encode=unpack, decode=pack)
    register_codec(Point, encode=unpack, decode=pack)  # a module that is loaded twice
    plain = encode([Point(1, 2)], "f returned")
    assert plain == [Coded("tests.test_journal.Point", [1, 2])]
    assert decode(plain) == [Point(1, 2)]
    assert fingerprint([Point(1, 2)], "f") != fingerprint([Point(1, 3)], "f")
    with pytest.raises(ValueError, match="has a codec already"):
        register_codec(Point, encode=unpack, decode=lambda pair: Point(0, 0))
    with pytest.raises(TypeError, match="needs no codec"):
        register_codec(int, encode=str, decode=int)
    with pytest.raises(TypeError, match="kind must be a type"):
        register_codec("Point", encode=unpack, decode=pack)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="decode must be a function"):
        register_codec(Colour, encode=int, decode=None)  # type: ignore[arg-type]
    with pytest.raises(LoopError, match="nothing is registered for it"):
        decode(Coded("gone", 1))


def test_a_codec_that_fails_is_named() -> None:
    class Bad:
        pass

    def fail(_: object) -> Any:
        raise KeyError("k")

    register_codec(Bad, encode=fail, decode=fail, name="bad")
    with pytest.raises(LoopError, match="codec can't encode"):
        encode(Bad(), "f returned")
    with pytest.raises(LoopError, match="codec of bad can't decode"):
        decode(Coded("bad", 1))
    for argument in (Bad(), [Bad()], {"it": (Bad(),)}):
        with pytest.raises(
            LoopError, match=r"f was given a .*Bad that its codec can't encode"
        ) as caught:
            fingerprint([1, argument], "f was given")
        assert isinstance(caught.value.__cause__, KeyError)


def test_values_are_compared_with_their_types() -> None:
    assert same(math.nan, math.nan)
    assert same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same(1, 1.0)
    assert not same(1, True)
    assert not same(b"a", "a")


def test_fingerprints_tell_arguments_apart() -> None:
    assert fingerprint([1, "a"], "f") == fingerprint([1, "a"], "f")
    assert fingerprint([1, "a"], "f") != fingerprint(["a", 1], "f")
    assert fingerprint([[1], 2], "f") != fingerprint([[1, 2]], "f")
    assert fingerprint([b"a"], "f") != fingerprint([b"b"], "f")
    assert fingerprint([object()], "f") == fingerprint([object()], "f")
    assert fingerprint([{(1, 2): 3}], "f") == fingerprint(
        [{(1, 2): 4}], "f"
    )  # of these, the type alone


def test_what_a_function_says_it_returns_is_known_beforehand() -> None:
    def says(annotation: Any) -> Callable[[], object]:
        def function() -> object: ...

        function.__annotations__["return"] = annotation
        return function

    assert unrecordable_return(says(set)) == "set"
    assert unrecordable_return(says(Colour)) == "tests.test_journal.Colour"
    for annotation in (None, Any, dict[str, int], set[int], "Nowhere", Mapping, Awaitable, object):
        assert unrecordable_return(says(annotation)) is None
    assert unrecordable_return(len) is None


# Replay


def response_of(*runs: tuple[str, int]) -> Response:
    """Columns made of runs: `("policy", 3)` is three sampled tokens."""
    response = Response()
    for kind, length in runs:
        ids = range(len(response), len(response) + length)
        if kind == "policy":
            response.append_policy(list(ids), [-1.0] * length, 0)
        else:
            response.append_context(ids)
    return response.seal()


TWO_TURNS = response_of(("policy", 2), ("context", 1), ("policy", 3))


def turn(
    begun: int, response: Response, start: int, stop: int, *, request: Request = AS_THE_TASK
) -> RecordedTurn:
    return RecordedTurn(begun, request, Turn("stop", None, 0, start, stop, 1, response))


def tool(begun: int, name: str, *, strand: int = 0, result: int | None = None) -> RecordedCall:
    outcome = None if result is None else Returned(result)
    return RecordedCall(begun, strand, "tool", name, "", outcome)


def context(prompt: int, *turns: RecordedTurn) -> RecordedContext:
    return RecordedContext(memoryview(array("i", [prompt])), TWO_TURNS, turns)


def journal(*contexts: RecordedContext, calls: tuple[RecordedCall, ...] = ()) -> Journal:
    return Journal(seed=0, attempts=1, contexts=contexts, calls=calls)


def opened(replay: Replay, prompt: int) -> ContextReplay:
    found = replay.open(memoryview(array("i", [prompt])))
    assert found is not None
    return found


def two_turns(prompt: int, first: int = 0, second: int = 1) -> RecordedContext:
    return context(prompt, turn(first, TWO_TURNS, 0, 2), turn(second, TWO_TURNS, 3, 6))


def test_a_loop_that_asks_the_same_is_given_the_same() -> None:
    counters = TokenCounters()
    replay = Replay(journal(two_turns(1)), counters)
    assert replay.unopened_tokens == replay.pending_tokens == 5
    assert replay.unopened_length == 6
    again, live = opened(replay, 1), Response()
    assert replay.open(memoryview(array("i", [1]))) is None
    first = again.next_turn(live, AS_THE_TASK)
    assert first is not None
    live.extend(TWO_TURNS[:2])
    live.append_context([2])
    second = again.next_turn(live, AS_THE_TASK)
    assert second is not None
    assert (first.begun, second.begun) == (0, 1)
    assert replay.is_over
    assert again.next_turn(live, AS_THE_TASK) is None
    assert counters.diverged == counters.discarded == 0


@pytest.mark.parametrize(
    "between",
    [[], [7], [2, 2], None],
    ids=["nothing", "another id", "more", "the same id, but the policy's"],
)
def test_other_tokens_before_a_turn_cut_the_record(between: list[int] | None) -> None:
    counters = TokenCounters()
    replay = Replay(journal(two_turns(1)), counters)
    again, live = opened(replay, 1), Response()
    again.next_turn(live, AS_THE_TASK)
    live.extend(TWO_TURNS[:2])
    if between is None:
        live.append_policy([2], [-1.0], 0)
    else:
        live.append_context(between)
    assert again.next_turn(live, AS_THE_TASK) is None
    assert (counters.diverged, counters.discarded) == (1, 3)
    assert replay.is_over


def test_another_request_cuts_the_record() -> None:
    for request in (Request(max_tokens=3), Request(Sampling(4)), Request(Sampling(5), 3)):
        counters = TokenCounters()
        replay = Replay(journal(two_turns(1)), counters)
        assert opened(replay, 1).next_turn(Response(), request) is None
        assert (counters.diverged, counters.discarded) == (1, 5)


def test_contexts_are_known_by_their_prompts_in_any_order() -> None:
    replay = Replay(journal(two_turns(1, 0, 3), two_turns(2, 1, 2)), TokenCounters())
    second = opened(replay, 2).next_turn(Response(), AS_THE_TASK)
    first = opened(replay, 1).next_turn(Response(), AS_THE_TASK)
    assert second is not None
    assert first is not None
    assert (first.begun, second.begun) == (0, 1)


def test_what_diverges_takes_along_what_began_after_it_and_nothing_else() -> None:
    counters = TokenCounters()
    calls = (tool(1, "early", strand=5, result=1), tool(4, "late", strand=6, result=2))
    replay = Replay(journal(two_turns(1, 0, 3), two_turns(2, 2, 5), calls=calls), counters)
    one, other = opened(replay, 1), opened(replay, 2)
    assert one.next_turn(Response(), AS_THE_TASK) is not None
    live = TWO_TURNS[:2]
    assert one.next_turn(live, AS_THE_TASK) is None  # it skips what it appended
    # Given again up to number 0: from 1 on, everything may have followed from it.
    assert replay.is_over
    assert other.next_turn(Response(), AS_THE_TASK) is None
    assert (counters.diverged, counters.discarded) == (1, 3 + 5)

    replay = Replay(journal(two_turns(1, 0, 3), two_turns(2, 2, 5), calls=calls), counters)
    one, other = opened(replay, 1), opened(replay, 2)
    assert other.next_turn(Response(), AS_THE_TASK) is not None
    assert other.next_turn(TWO_TURNS[:2], AS_THE_TASK) is None
    assert [call.name for call in replay.calls] == ["early"]
    assert one.next_turn(Response(), AS_THE_TASK) is not None  # number 0 began before
    assert (counters.diverged, counters.discarded) == (2, 8 + 6)


class Asking:
    """A rollout's calls while it runs again."""

    def __init__(self, calls: tuple[RecordedCall, ...], counters: TokenCounters) -> None:
        recorded = journal(calls=calls)
        self.replay = Replay(recorded, counters)
        self.log = CallLog(recorded)
        self._number = recorded.next_number
        self._strands: dict[object, int] = {MAIN: MAIN}

    def ask(self, name: str, *, task: object = MAIN) -> int | None:
        """Calls a tool; returns the number of the recorded call, if it was one."""
        strand = self._strands.get(task)
        call = self.log.begin(self._number, strand, "tool", name, "", self.replay)
        self._strands[task] = call.strand
        if call.begun != self._number:
            return call.begun
        self._number += 1
        return None


def test_calls_of_one_task_keep_their_order() -> None:
    counters = TokenCounters()
    calls = (tool(0, "a", result=1), tool(1, "b", result=2), tool(2, "a", result=3))
    asking = Asking(calls, counters)
    assert [asking.ask(name) for name in ("a", "b", "a", "a")] == [0, 1, 2, None]
    assert asking.replay.is_over
    assert [call.strand for call in asking.log.calls.values()] == [0, 0, 0, 0]
    assert [call.outcome for call in asking.log.calls.values()] == [
        Returned(1),
        Returned(2),
        Returned(3),
        None,
    ]

    asking = Asking(calls, counters)
    assert asking.ask("a") == 0
    assert asking.ask("c") is None  # it made another call here
    assert asking.ask("a") is None
    assert counters.diverged == 1

    asking = Asking(calls, counters)
    assert asking.ask("c") is None  # already the first is another
    assert asking.replay.is_over
    assert counters.diverged == 2


def test_calls_of_several_tasks_come_in_any_order() -> None:
    calls = (
        tool(0, "a", strand=1, result=1),
        tool(1, "b", strand=2, result=2),
        tool(2, "c", strand=1, result=3),
        tool(3, "d", strand=2, result=4),
    )
    counters = TokenCounters()
    asking = Asking(calls, counters)
    order = [("b", 20), ("d", 20), ("new", 20), ("a", 10), ("another", 30), ("c", 10)]
    assert [asking.ask(name, task=task) for name, task in order] == [1, 3, None, 0, None, 2]
    assert {call.name: call.strand for call in asking.log.calls.values()} == {
        "a": 1,
        "c": 1,
        "b": 2,
        "d": 2,
        "new": 2,
        "another": 3,
    }
    assert counters.diverged == 0


def test_a_task_that_makes_its_first_call_ends_no_record_of_another() -> None:
    """Which of several tasks had made a call when their rollout was cut is chance."""
    counters = TokenCounters()
    asking = Asking((tool(0, "a", strand=1, result=1),), counters)
    assert [asking.ask(name, task=name) for name in ("b", "c", "a")] == [None, None, 0]
    assert counters.diverged == 0


def test_the_task_that_runs_the_loop_is_told_from_its_children() -> None:
    counters = TokenCounters()
    calls = (tool(0, "a", strand=MAIN, result=1), tool(1, "a", strand=1, result=2))
    asking = Asking(calls, counters)
    assert [asking.ask("a", task=task) for task in ("child", MAIN)] == [1, 0]
    asking = Asking(calls, counters)
    assert asking.ask("b", task="child") is None
    assert counters.diverged == 0
    assert asking.ask("b") is None
    assert counters.diverged == 1


def test_tasks_that_made_the_same_call_may_change_places() -> None:
    calls = tuple(tool(i, f"t{i}", strand=1 + i % 2, result=i) for i in range(4))
    asking = Asking(calls, TokenCounters())
    assert [asking.ask(f"t{i}", task=40 + i) for i in (1, 0, 3, 2)] == [1, 0, 3, 2]


def test_a_call_that_ended_is_recorded_with_its_outcome() -> None:
    log = CallLog(None)
    call = log.begin(3, MAIN, "tool", "a", "", None)
    assert log.calls == {3: tool(3, "a")}
    log.end(call, Raised("ToolError: x"))
    assert log.calls == {3: evolve(tool(3, "a"), outcome=Raised("ToolError: x"))}


def test_a_journal_that_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="numbers of their own"):
        journal(two_turns(1), calls=(tool(1, "a"),))
    with pytest.raises(ValueError, match="numbers of their own"):
        journal(calls=(tool(-1, "a"),))
    with pytest.raises(ValueError, match="after one that ends at 2"):
        context(1, turn(0, TWO_TURNS, 0, 2), turn(1, TWO_TURNS, 1, 4))
    with pytest.raises(ValueError, match="comes after turn"):
        two_turns(1, 4, 3)
    assert journal().is_empty
    assert (journal().next_number, journal(two_turns(1)).next_number) == (0, 2)
    assert not journal(calls=(tool(1, "a"),)).is_empty
