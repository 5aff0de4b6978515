"""Records: the packed response against a naive model, attempts against their rules, and what constructors refuse."""

from __future__ import annotations

import math
import pickle
import struct
import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from rollnest import (
    CONTEXT_VERSION,
    Attempt,
    Batch,
    Failure,
    FinishReason,
    Group,
    Prompt,
    Response,
    Sample,
    Sampling,
    Segment,
    Status,
    Turn,
    Verdict,
)
from rollnest._attempt import TokenCounters
from rollnest._response import LOGPROB_ROUNDING
from rollnest.errors import InferenceError
from rollnest.testing._check import check_sample
from rollnest.testing.strategies import (
    batches,
    groups,
    prompts,
    responses,
    samples,
    samplings,
    segments,
    token_ids,
)

quick = settings(max_examples=50, deadline=None)
thorough = settings(max_examples=150, deadline=None)

NEVER_JUDGED = [Status.INIT, Status.ABORTED, Status.EXPIRED, Status.FAILED]


# A naive model of the response: one list of tokens


@define
class Token:
    token: int
    logprob: float
    policy: bool
    version: int


@define
class Model:
    """What a response should hold, kept in the plainest way."""

    tokens: list[Token] = field(factory=list)

    @property
    def newest(self) -> int:
        return max((t.version for t in self.tokens if t.policy), default=0)

    def check(self, response: Response) -> None:
        tokens = self.tokens
        assert len(response) == len(tokens)
        assert response.ids.tolist() == [t.token for t in tokens]
        assert response.logprobs.tolist() == [t.logprob for t in tokens]
        assert response.origin.tolist() == [int(t.policy) for t in tokens]
        assert response.versions.tolist() == [t.version for t in tokens]
        assert response.policy_tokens == sum(t.policy for t in tokens)
        versions = [t.version for t in tokens if t.policy]
        assert response.oldest_version == min(versions, default=None)
        assert response.newest_version == max(versions, default=None)
        assert [
            (version, start, stop) for version, start, stop in response.version_runs
        ] == self.runs()

    def runs(self) -> list[tuple[int, int, int]]:
        runs: list[tuple[int, int, int]] = []
        for at, token in enumerate(self.tokens):
            if runs and runs[-1][0] == token.version:
                runs[-1] = (token.version, runs[-1][1], at + 1)
            else:
                runs.append((token.version, at, at + 1))
        return runs


logprob = st.floats(-100, 0, width=32)
version = st.integers(0, 5)


@st.composite
def policy_step(draw: st.DrawFn) -> tuple[str, list[int], list[float], int | list[int]]:
    ids = draw(token_ids())
    logprobs = draw(st.lists(logprob, min_size=len(ids), max_size=len(ids)))
    each = st.lists(version, min_size=len(ids), max_size=len(ids)).map(sorted)
    return "policy", ids, logprobs, draw(version | each)


step = st.one_of(
    policy_step(),
    st.tuples(st.just("context"), token_ids()),
    st.tuples(st.just("extend"), responses(max_tokens=8)),
    st.tuples(st.just("slice"), st.integers(-30, 30), st.integers(-30, 30)),
    st.tuples(st.just("trim")),
)


def columns(response: Response) -> tuple[list[int], list[float], list[int], list[int]]:
    logprobs: list[Any] = response.logprobs.tolist()
    return (
        response.ids.tolist(),
        logprobs,
        response.origin.tolist(),
        response.versions.tolist(),
    )


def copy_of(response: Response) -> Response:
    copy = Response()
    copy.extend(response)
    return copy


def apply_policy(
    response: Response, model: Model, ids: list[int], logprobs: list[float], versions: Any
) -> None:
    each = [versions] * len(ids) if isinstance(versions, int) else versions
    if ids and each[0] < model.newest:
        before = columns(response)
        with pytest.raises(ValueError, match="versions never decrease"):
            response.append_policy(ids, logprobs, versions)
        assert columns(response) == before
        return
    response.append_policy(ids, logprobs, versions)
    model.tokens += [Token(i, p, True, v) for i, p, v in zip(ids, logprobs, each, strict=True)]


def apply_extend(response: Response, model: Model, other: Response) -> None:
    if other.oldest_version is not None and other.oldest_version < model.newest:
        before = columns(response)
        with pytest.raises(ValueError, match="versions never decrease"):
            response.extend(other)
        assert columns(response) == before
        return
    response.extend(other)
    for token, p, made_by, v in zip(*columns(other), strict=True):
        model.tokens.append(Token(token, p, bool(made_by), v))


@thorough
@given(steps=st.lists(step, max_size=8))
def test_any_sequence_of_operations_keeps_the_columns_in_step(
    steps: list[tuple[Any, ...]],
) -> None:
    response, model = Response(), Model()
    for name, *arguments in steps:
        match name:
            case "policy":
                apply_policy(response, model, *arguments)
            case "context":
                response.append_context(arguments[0])
                model.tokens += [Token(i, 0.0, False, CONTEXT_VERSION) for i in arguments[0]]
            case "extend":
                apply_extend(response, model, arguments[0])
            case "slice":
                start, stop = arguments
                piece = response[start:stop]
                assert piece.sealed
                Model(model.tokens[start:stop]).check(piece)
            case _:
                kept = [i for i, t in enumerate(model.tokens) if t.policy]
                trimmed = response.without_trailing_context()
                Model(model.tokens[: kept[-1] + 1 if kept else 0]).check(trimmed)
        model.check(response)
    assert response[:] == response
    assert copy_of(response) == response
    model.check(response.seal())


# What an append refuses, it refuses whole

bad_policy_steps: list[tuple[str, Any, Any, Any, type[Exception], str]] = [
    ("fewer logprobs", [5, 6], [-1.0], 3, ValueError, "2 ids but 1 logprobs"),
    ("more logprobs", [5], [-1.0, -1.0], 3, ValueError, "1 ids but 2 logprobs"),
    ("nan", [5, 6], [-1.0, math.nan], 3, ValueError, r"logprobs\[1\] must be finite.*nan"),
    ("-inf", [5, 6], [-math.inf, -1.0], 3, ValueError, r"logprobs\[0\] must be finite.*-inf"),
    ("+inf", [5], [math.inf], 3, ValueError, r"logprobs\[0\] must be finite.*inf"),
    ("inf - inf", [5, 6], [math.inf, -math.inf], 3, ValueError, r"logprobs\[0\] must be finite"),
    ("above 0", [5, 6], [-1.0, 0.001], 3, ValueError, r"logprobs\[1\] must be finite and <= 0"),
    ("beyond float32", [5], [-1e39], 3, ValueError, r"logprobs\[0\] must be finite"),
    ("negative id", [5, -1], [-1.0, -1.0], 3, ValueError, r"ids\[1\] must be >= 0, got -1"),
    ("huge id", [2**31, 5], [-1.0, -1.0], 3, ValueError, f"does not fit 32 bits: {2**31}"),
    ("float id", [5.0], [-1.0], 3, TypeError, "integer"),
    ("text", "ab", [-1.0, -1.0], 3, TypeError, "ids must be integers, got str"),
    ("null id", [5, None], [-1.0, -1.0], 3, TypeError, "integer"),
    ("null logprob", [5], [None], 3, TypeError, "real number"),
    ("old version", [5], [-1.0], 1, ValueError, "versions never decrease: 1 after 2"),
    ("negative version", [5], [-1.0], -1, ValueError, "version"),
    ("falling", [5, 6], [-1.0, -1.0], [4, 3], ValueError, "versions never decrease: 3 after 4"),
    ("old first", [5, 6], [-1.0, -1.0], [1, 3], ValueError, "versions never decrease: 1 after 2"),
    ("fewer versions", [5, 6], [-1.0, -1.0], [3], ValueError, "2 ids but 1 versions"),
    ("no version", [5], [-1.0], [-1], ValueError, "a version must be >= 0, got -1"),
    ("huge version", [5], [-1.0], 2**31, ValueError, "version"),
    ("huge versions", [5, 6], [-1.0, -1.0], [3, 2**31], ValueError, "version"),
    (
        "huge id of an iterator",
        iter([2**31]),
        [-1.0],
        3,
        ValueError,
        f"does not fit 32 bits: {2**31}",
    ),
]


def grown() -> Response:
    response = Response()
    response.append_policy([7, 9], [-0.5, -0.25], 2)
    response.append_context([40])
    return response


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions", "error", "message"),
    [case[1:] for case in bad_policy_steps],
    ids=[case[0] for case in bad_policy_steps],
)
def test_bug_020_a_bad_append_raises_and_changes_nothing(
    ids: Any, logprobs: Any, versions: Any, error: type[Exception], message: str
) -> None:
    response = grown()
    with pytest.raises(error, match=message):
        response.append_policy(ids, logprobs, versions)
    assert response == grown()
    assert columns(response) == columns(grown())


def test_bug_020_logprobs_thrown_away_by_a_custom_function_are_missed_at_once() -> None:
    response = Response()
    with pytest.raises(ValueError, match="2 ids but 0 logprobs"):
        response.append_policy([5, 6], [], 0)
    assert len(response) == 0


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], "ab", [None]], ids=str)
def test_bad_context_raises_and_changes_nothing(ids: Any) -> None:
    response = grown()
    with pytest.raises((ValueError, TypeError)):
        response.append_context(ids)
    assert response == grown()


@pytest.mark.parametrize(
    "grow",
    [
        lambda r: r.append_policy([5], [-1.0], 9),
        lambda r: r.append_context([5]),
        lambda r: r.extend(grown()),
    ],
    ids=["policy", "context", "extend"],
)
def test_a_sealed_response_does_not_grow(grow: Callable[[Response], None]) -> None:
    response = grown().seal()
    with pytest.raises(TypeError, match="sealed"):
        grow(response)
    assert response == grown()


def test_an_empty_response_can_be_sliced_shown_and_trimmed() -> None:
    assert len(Response()[:]) == 0
    assert len(Response().without_trailing_context()) == 0
    assert Response().version_runs == ()
    assert repr(Response()) == "<Response of 0 tokens: empty>"


def test_a_slice_with_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step=2"):
        grown()[::2]


def test_a_response_extended_by_itself_is_there_twice() -> None:
    response = grown()
    response.extend(response)
    assert response.ids.tolist() == [7, 9, 40, 7, 9, 40]
    assert response.versions.tolist() == [2, 2, -1, 2, 2, -1]


def test_rounding_above_zero_is_let_through() -> None:
    response = Response()
    response.append_policy([5], [5e-5], 0)
    assert response.logprobs.tolist() == [pytest.approx(5e-5)]


def test_bug_012_context_counts_for_length_and_never_for_training() -> None:
    response = Response()
    response.append_policy([5, 6], [-1, -1], 0)
    response.append_context([40, 41, 42])
    response.append_policy([7, 9], [-1, -1], 0)
    segment = Segment(view([1]), response.seal())
    assert segment.mask.tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert len(segment) == 7
    assert segment.logprobs.tolist() == [-1, -1, 0, 0, 0, -1, -1]


def test_bug_009_an_empty_response_has_empty_columns() -> None:
    segment = Segment(view([1, 2, 3]), Response().seal())
    assert [c.tolist() for c in (segment.ids, segment.mask, segment.logprobs)] == [[], [], []]
    assert len(segment.prompt_ids) == 3


# Views and memory


@quick
@given(response=responses())
def test_sealed_columns_reach_numpy_and_torch_without_a_copy(response: Response) -> None:
    for name, dtype in (("ids", np.int32), ("logprobs", np.float32)):
        column: memoryview[Any] = getattr(response, name)
        assert column.readonly
        one, two = np.asarray(column), np.asarray(getattr(response, name))
        assert one.dtype == dtype
        assert one.tolist() == column.tolist()
        if len(response):
            assert np.shares_memory(one, two)
    assert np.asarray(response.origin).dtype == np.uint8
    assert np.asarray(response.versions).dtype == np.int32
    if len(response):
        # torch has no read-only tensors and warns of them, once; a trainer copies into a tensor of its own.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            tensor = torch.frombuffer(response.ids, dtype=torch.int32)
        assert tensor.tolist() == response.ids.tolist()
        assert tensor.data_ptr() == np.asarray(response.ids).ctypes.data


def test_a_view_of_a_growing_response_is_a_copy_and_does_not_stop_it() -> None:
    response = grown()
    before = response.ids
    response.append_context([41])
    assert before.tolist() == [7, 9, 40]
    assert response.ids.tolist() == [7, 9, 40, 41]


@pytest.mark.parametrize("name", ["ids", "logprobs", "origin", "versions"])
def test_columns_can_not_be_written(name: str) -> None:
    column: Any = getattr(grown().seal(), name)
    with pytest.raises(TypeError):
        column[0] = 1


def test_a_token_costs_eight_bytes_and_a_run_two_numbers() -> None:
    response = Response()
    for v in range(10):
        response.append_policy([5] * 1000, [-1.0] * 1000, v)
    packed: tuple[array[int] | array[float], ...] = (response._ids, response._logprobs)
    assert sum(len(column) * column.itemsize for column in packed) == 8 * 10_000
    assert len(response._runs) == 2 * 10


def test_versions_of_one_turn_after_another_are_one_run_while_they_are_equal() -> None:
    response = Response()
    for _ in range(100):
        response.append_policy([5], [-1.0], 3)
    assert response.version_runs == ((3, 0, 100),)


# Attempts


def attempt(max_tokens: int = 4, **options: Any) -> tuple[Attempt, TokenCounters]:
    counters = TokenCounters()
    options = {"version": 2, "vocab_size": 50, **options}
    made = Attempt(
        [1, 2, 3], max_tokens=max_tokens, sampling=Sampling(8), counters=counters, **options
    )
    return made, counters


def commit(made: Attempt, ids: Sequence[int], versions: Any = None) -> int:
    return made.commit(ids, [-1.0] * len(ids), versions)


@quick
@given(
    deltas=st.lists(token_ids(max_size=4, vocab_size=50), max_size=6),
    cap=st.integers(1, 12),
    given_up_after=st.integers(0, 6),
)
def test_every_token_that_arrives_is_recorded_or_counted(
    deltas: list[list[int]], cap: int, given_up_after: int
) -> None:
    made, counters = attempt(cap)
    in_time = [token for delta in deltas[:given_up_after] for token in delta]
    for number, delta in enumerate(deltas):
        if number == given_up_after:
            made.close()
        before = len(made.received)
        assert commit(made, delta) == len(made.received) - before
    assert made.received.ids.tolist() == in_time[:cap]
    assert counters.committed == len(made.received)
    assert counters.rejected == len(in_time) - counters.committed
    assert counters.late == sum(map(len, deltas)) - len(in_time)


def test_bug_016_what_is_beyond_the_cap_is_in_no_column_and_counted() -> None:
    made, counters = attempt(3)
    assert made.commit([5, 6, 7, 8, 9], [-1, -2, -3, -4, -5]) == 3
    assert made.received.ids.tolist() == [5, 6, 7]
    assert made.received.logprobs.tolist() == [-1, -2, -3]
    assert made.received.versions.tolist() == [2, 2, 2]
    assert (counters.committed, counters.rejected) == (3, 2)
    assert made.commit([5], [-1]) == 0
    assert counters.rejected == 3


def test_versions_beyond_the_cap_go_with_their_tokens() -> None:
    made, _ = attempt(2)
    assert commit(made, [5, 6, 7], [2, 3, 4]) == 2
    assert made.received.versions.tolist() == [2, 3]


bad_commits: list[tuple[str, Any, Any, Any, str]] = [
    ("fewer logprobs", [5, 6], [-1.0], None, "2 ids but 1 logprobs"),
    ("more logprobs", [5], [-1.0, -1.0], None, "1 ids but 2 logprobs"),
    ("id at the end of the vocabulary", [5, 50], [-1.0, -1.0], None, r"ids\[1\] = 50 is outside"),
    ("negative id", [-1], [-1.0], None, r"ids\[0\] must be >= 0"),
    ("nan", [5, 6], [-1.0, math.nan], None, r"logprobs\[1\] must be finite"),
    ("above zero", [5], [0.5], None, r"logprobs\[0\] must be finite and <= 0"),
    ("null id", [5, None, 7], [-0.1, -0.2, -0.3], None, "integer"),
    ("null logprob", [5], [None], None, "real number"),
    ("older than the attempt", [5], [-1.0], 1, "tokens of version 1, but the policy has had 2"),
    ("falling versions", [5, 6], [-1.0, -1.0], [4, 3], "versions never decrease"),
    ("fewer versions", [5, 6], [-1.0, -1.0], [2], "2 ids but 1 versions"),
    ("fewer versions beyond the cap", [5] * 6, [-1.0] * 6, [2] * 5, "6 ids but 5 versions"),
    ("nan beyond the cap", [5] * 6, [-1.0] * 5 + [math.nan], None, "must be finite"),
    ("huge version", [5], [-1.0], 2**31, "version"),
]


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions", "message"),
    [case[1:] for case in bad_commits],
    ids=[case[0] for case in bad_commits],
)
def test_bug_013_an_unusable_answer_is_refused_whole(
    ids: Any, logprobs: Any, versions: Any, message: str
) -> None:
    made, counters = attempt()
    commit(made, [7])
    with pytest.raises(InferenceError, match=f"the server's answer is unusable: .*{message}"):
        made.commit(ids, logprobs, versions)
    assert made.received.ids.tolist() == [7]
    assert (counters.committed, counters.rejected) == (1, len(ids))
    assert not made.closed


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [(None, [-1.0]), ([5], None), (None, None)],
    ids=["ids", "logprobs", "both"],
)
def test_bug_091_a_column_that_is_null_is_an_unusable_answer(ids: Any, logprobs: Any) -> None:
    made, _ = attempt()
    with pytest.raises(InferenceError, match="the server's answer is unusable"):
        made.commit(ids, logprobs)
    assert len(made.received) == 0


def test_a_commit_within_the_cap_is_checked_beyond_it_too() -> None:
    # What is cut off belongs to the same answer: if it is broken, so is the answer.
    made, _ = attempt(1)
    with pytest.raises(InferenceError, match=r"ids\[1\] = 99 is outside"):
        commit(made, [5, 99])
    assert len(made.received) == 0


def test_what_comes_after_the_attempt_was_given_up_is_not_even_looked_at() -> None:
    made, counters = attempt()
    made.close()
    made.close()
    assert made.commit([5, 99], []) == 0
    made.finish("nonsense")
    assert made.finish_reason is None
    assert counters.late == 2


def test_an_abort_is_an_ordinary_end_that_keeps_the_partial() -> None:
    made, _ = attempt()
    commit(made, [5, 6])
    made.finish(FinishReason.ABORT, "paused")
    assert made.finish_reason is FinishReason.ABORT
    assert made.detail == "paused"
    assert made.received.ids.tolist() == [5, 6]


def test_nothing_comes_after_the_end() -> None:
    made, counters = attempt()
    made.finish("stop")
    with pytest.raises(InferenceError, match="tokens after the finish reason 'stop'"):
        commit(made, [5])
    with pytest.raises(InferenceError, match="finished twice, 'stop' and 'length'"):
        made.finish("length")
    assert made.finish_reason is FinishReason.STOP
    assert counters.rejected == 1


@pytest.mark.parametrize("reason", ["", "eos", "STOP", "tool_calls", None, 3], ids=str)
def test_an_unknown_finish_reason_is_refused(reason: Any) -> None:
    made, _ = attempt()
    with pytest.raises(InferenceError, match="unknown finish reason"):
        made.finish(reason)
    assert made.finish_reason is None


def test_the_echoed_prompt_must_be_the_one_that_was_sent() -> None:
    made, _ = attempt()
    made.check_echo([1, 2, 3])
    for other in ([], [1, 2], [1, 2, 4], [1, 2, 3, 5]):
        with pytest.raises(InferenceError, match="it echoed another prompt"):
            made.check_echo(other)


def test_every_attempt_has_an_id_of_its_own() -> None:
    ids = {attempt()[0].id for _ in range(100)}
    assert len(ids) == 100
    assert all(len(i) == 32 and int(i, 16) >= 0 for i in ids)


@pytest.mark.parametrize("cap", [0, -1])
def test_bug_030_an_attempt_without_room_is_never_made(cap: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens must be >= 1, got {cap}"):
        attempt(cap)


# Constructors


def view(ids: Iterable[int]) -> memoryview[int]:
    return memoryview(array("i", ids)).toreadonly()


def segment_of(ids: Sequence[int] = (5, 6), made_at: int = 0) -> Segment:
    response = Response()
    response.append_policy(ids, [-1.0] * len(ids), made_at)
    return Segment(view([1, 2]), response.seal())


PROMPT = Prompt("p", token_ids=[1, 2])
DONE = Sample(
    task="t", prompt=PROMPT, visit=0, index=0, status=Status.COMPLETED, segments=(segment_of(),)
)


def test_a_segment_needs_a_sealed_response() -> None:
    with pytest.raises(ValueError, match="must be sealed"):
        Segment(view([1]), Response())


@pytest.mark.parametrize("given_segments", [(), (Segment(view([1]), Response().seal()),)], ids=len)
def test_a_completed_sample_needs_an_answer(given_segments: tuple[Segment, ...]) -> None:
    with pytest.raises(ValueError, match="at least one token of the policy"):
        evolve(DONE, segments=given_segments)


def test_a_completed_sample_of_context_alone_is_refused() -> None:
    response = Response()
    response.append_context([40])
    with pytest.raises(ValueError, match="at least one token of the policy"):
        evolve(DONE, segments=(Segment(view([1]), response.seal()),))


@pytest.mark.parametrize("status", NEVER_JUDGED)
def test_a_sample_that_was_never_judged_carries_no_verdict(status: Status) -> None:
    failure = Failure("loop", "x") if status is Status.FAILED else None
    with pytest.raises(ValueError, match=f"{status.name} samples carry no verdict"):
        evolve(DONE, status=status, failure=failure, verdict=Verdict(1.0))


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.FAILED])
def test_only_a_failed_sample_carries_a_failure(status: Status) -> None:
    with pytest.raises(ValueError, match="exactly FAILED samples carry a failure"):
        evolve(DONE, status=status, failure=Failure("loop", "x"))


def test_a_failed_sample_needs_its_failure() -> None:
    with pytest.raises(ValueError, match="exactly FAILED samples carry a failure"):
        evolve(DONE, status=Status.FAILED)


def test_an_unknown_kind_of_failure_is_refused() -> None:
    kind: Any = "cosmic"
    with pytest.raises(ValueError, match="cosmic"):
        Failure(kind, "x")


def test_a_failure_keeps_the_errors_text_and_no_frames() -> None:
    try:
        raise ValueError("bad number")
    except ValueError as error:
        failure = Failure.of("loop", error)
    assert failure.message == "ValueError: bad number"
    assert "in test_a_failure_keeps" in failure.traceback
    assert Failure.of("loop", KeyboardInterrupt()).message == "KeyboardInterrupt"


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_verdict_is_finite(score: float) -> None:
    with pytest.raises(ValueError, match="score must be finite"):
        Verdict(score)
    with pytest.raises(ValueError, match=r"parts\['a'\] must be finite"):
        Verdict(1.0, parts={"a": score})


@pytest.mark.parametrize("score", [None, "1", True, [1.0]], ids=str)
def test_a_verdict_is_a_number(score: Any) -> None:
    with pytest.raises(TypeError, match="score must be a number"):
        Verdict(score)


def test_a_group_needs_samples_of_its_own() -> None:
    with pytest.raises(ValueError, match="needs at least one sample"):
        Group(task="t", prompt=PROMPT, visit=0, samples=())
    for stranger in (evolve(DONE, task="u"), evolve(DONE, visit=1)):
        with pytest.raises(ValueError, match="in group t/0"):
            Group(task="t", prompt=PROMPT, visit=0, samples=(DONE, stranger))
    with pytest.raises(ValueError, match="visit must be >= 0"):
        Group(task="t", prompt=PROMPT, visit=-1, samples=(DONE,))
    nothing: Any = ["sample"]
    with pytest.raises(TypeError, match="samples"):
        Group(task="t", prompt=PROMPT, visit=0, samples=nothing)


def test_a_groups_status_is_the_worst_of_its_members() -> None:
    def group(*statuses: Status) -> Group:
        members = [
            evolve(
                DONE,
                index=i,
                status=status,
                failure=Failure("loop", "x") if status is Status.FAILED else None,
            )
            for i, status in enumerate(statuses)
        ]
        return Group(task="t", prompt=PROMPT, visit=0, samples=tuple(members))

    done, cut = Status.COMPLETED, Status.ABORTED
    assert group(done, done).status is done
    assert group(done, cut).status is cut
    assert group(cut, Status.FAILED, Status.EXPIRED).status is Status.FAILED
    assert group(done, Status.EXPIRED, Status.FILTERED).status is Status.EXPIRED


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"messages": None}, ValueError, "'p' needs messages or token_ids"),
        ({"messages": []}, ValueError, "'p' needs messages or token_ids"),
        ({"token_ids": []}, ValueError, "'p' needs messages or token_ids"),
        ({"token_ids": [1, -2]}, ValueError, r"token_ids: ids\[1\] must be >= 0, got -2"),
        ({"token_ids": [1.5]}, TypeError, "token_ids"),
        ({"token_ids": "abc"}, TypeError, "token_ids"),
        ({"messages": ["hi"]}, TypeError, r"messages\[0\] must be a mapping with a role"),
        ({"messages": [{"content": "hi"}]}, TypeError, r"messages\[0\] must be a mapping"),
        ({"token_ids": [1], "data_source": 5}, TypeError, "data_source"),
        ({"token_ids": [1], "uid": ""}, ValueError, "uid must not be empty"),
        ({"token_ids": [1], "uid": "  "}, ValueError, "uid must not be empty"),
        ({"token_ids": [1], "uid": 3}, TypeError, "uid must be a string, got 3"),
    ],
    ids=str,
)
def test_a_prompt_that_can_not_be_asked_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Prompt(**{"uid": "p", **options})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_tokens": 0}, ValueError),
        ({"max_tokens": -1}, ValueError),
        ({"max_tokens": 1.0}, TypeError),
        ({"max_tokens": True}, TypeError),
        ({"min_tokens": -1}, ValueError),
        ({"min_tokens": 9}, ValueError),
        ({"temperature": -0.1}, ValueError),
        ({"temperature": math.nan}, ValueError),
        ({"temperature": math.inf}, ValueError),
        ({"temperature": "1"}, TypeError),
        ({"top_p": 0.0}, ValueError),
        ({"top_p": 1.1}, ValueError),
        ({"top_k": 0}, ValueError),
        ({"top_k": 1.5}, TypeError),
        ({"min_p": -0.1}, ValueError),
        ({"min_p": 1.1}, ValueError),
        ({"stop": [""]}, ValueError),
        ({"stop": [5]}, TypeError),
        ({"stop_token_ids": [-1]}, ValueError),
        ({"stop_token_ids": ["5"]}, TypeError),
        ({"seed": -1}, ValueError),
        ({"seed": "random"}, TypeError),
    ],
    ids=str,
)
def test_bad_sampling_is_refused_by_name_and_value(
    options: dict[str, Any], error: type[Exception]
) -> None:
    ((name, value),) = options.items()
    shown = value[0] if isinstance(value, list) else value
    with pytest.raises(error, match=rf"{name}.*{shown}"):
        Sampling(**{"max_tokens": 8, **options})


def test_a_newline_is_a_stop_string() -> None:
    assert Sampling(8, stop="\n").stop == ("\n",)


def test_a_turn_reads_its_part_of_the_response() -> None:
    response = grown()
    turn = Turn("stop", "t", segment=0, start=0, stop=2, attempts=1, response=response)
    assert turn.ids.tolist() == [7, 9]
    assert len(turn) == 2
    assert turn.response.logprobs.tolist() == [-0.5, -0.25]


# What the strategies draw, and what the check finds


@quick
@given(sample=samples())
def test_every_sample_that_is_drawn_passes_the_check(sample: Sample) -> None:
    check_sample(sample, max_response_tokens=200)


@quick
@given(group=groups(status=None, judged=None))
def test_groups_are_consistent(group: Group) -> None:
    assert [s.index for s in group.samples] == list(range(len(group)))
    assert group.rewards == tuple(s.reward for s in group.samples)
    versions = [s.oldest_version for s in group.samples if s.oldest_version is not None]
    assert group.oldest_version == min(versions, default=None)
    for sample in group.samples:
        check_sample(sample)
        assert sample.lag(7) == (0 if sample.oldest_version is None else 7 - sample.oldest_version)


@quick
@given(batch=batches(tasks=["a", "b"]))
def test_batches_hold_completed_judged_groups_of_their_tasks(batch: Batch) -> None:
    drawn = list(batch.samples)
    assert all(s.status is Status.COMPLETED and s.reward is not None for s in drawn)
    assert all(s.lag(batch.version) >= 0 for s in drawn)
    assert batch.statistics.samples == len(drawn) == sum(map(len, batch.groups))
    assert sum(t.groups for t in batch.tasks.values()) == len(batch) == batch.statistics.groups
    assert len({(g.task, g.visit) for g in batch.groups}) == len(batch)
    assert sum(batch.statistics.lag_histogram.values()) == len(drawn)
    policy = sum(s.policy_tokens for s in drawn)
    assert batch.statistics.policy_tokens == policy


@quick
@given(segment=segments(min_policy_tokens=1), prompt=prompts(), sampling=samplings())
def test_parts_of_samples_are_drawn_too(
    segment: Segment, prompt: Prompt, sampling: Sampling
) -> None:
    assert segment.response.sealed
    assert segment.response.policy_tokens >= 1
    assert prompt.messages or prompt.token_ids
    assert sampling.temperature > 0


def with_columns(**columns: Any) -> Sample:
    """A completed sample with one turn and one tool answer, and columns that nothing checked."""
    response = Response()
    response.append_policy([5, 6], [-1.0, -2.0], 1)
    response.append_context([40])
    for name, values in columns.items():
        setattr(response, name, values)
    response.seal()
    turn = Turn("stop", "", segment=0, start=0, stop=2, attempts=1, response=response)
    return evolve(DONE, segments=(Segment(view([1]), response),), turns=(turn,))


def test_a_good_sample_passes() -> None:
    check_sample(with_columns(), max_response_tokens=3)


@pytest.mark.parametrize(
    ("invariant", "columns"),
    [
        ("I1", {"_ids": array("i", [5, 6])}),
        ("I1", {"_logprobs": array("f", [-1, -2])}),
        ("I1", {"_runs": (2, 1, 4, -1)}),
        ("I1", {"_ids": array("i", [5, -6, 40])}),
        ("I2", {"_logprobs": array("f", [-1, -2, -0.5])}),
        ("I2", {"_runs": (2, -1, 3, -1)}),
        ("I4", {"_runs": (2, 1, 3, 1)}),
        ("I3", {"_logprobs": array("f", [-1, math.nan, 0])}),
        ("I3", {"_logprobs": array("f", [-math.inf, -1, 0])}),
        ("I3", {"_logprobs": array("f", [-1, 0.01, 0])}),
        (
            "I3",
            {"_runs": (1, 2, 2, 1, 3, -1)},
        ),
    ],
    ids=str,
)
def test_the_check_finds_columns_that_are_out_of_step(
    invariant: str, columns: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError, match=f"^{invariant}: "):
        check_sample(with_columns(**columns))


def turn_at(start: int, stop: int, segment: int = 0, response: Response | None = None) -> Turn:
    response = response or with_columns().segments[0].response
    return Turn("stop", "", segment=segment, start=start, stop=stop, attempts=1, response=response)


@pytest.mark.parametrize(
    ("invariant", "turns"),
    [
        ("I4", []),
        ("I4", [turn_at(0, 1)]),
        ("I4", [turn_at(0, 3)]),
        ("I4", [turn_at(0, 4)]),
        ("I4", [turn_at(0, 2), turn_at(1, 2)]),
        ("I4", [turn_at(1, 2), turn_at(0, 1)]),
        ("I4", [turn_at(0, 2, segment=1)]),
        ("I4", [turn_at(0, 2, response=grown())]),
        ("I5", [turn_at(0, 2), turn_at(2, 2)]),
    ],
    ids=str,
)
def test_the_check_finds_turns_that_are_not_where_they_say(
    invariant: str, turns: list[Turn]
) -> None:
    with pytest.raises(AssertionError, match=f"^{invariant}: "):
        check_sample(evolve(with_columns(), turns=tuple(turns)))


def test_the_check_finds_a_response_beyond_its_cap() -> None:
    with pytest.raises(AssertionError, match=r"^I5: 3 tokens of 2$"):
        check_sample(with_columns(), max_response_tokens=2)


def test_the_check_finds_outcomes_that_must_not_exist() -> None:
    def forced(sample: Sample, **fields: Any) -> Sample:
        for name, value in fields.items():
            object.__setattr__(sample, name, value)
        return sample

    bad = [
        forced(with_columns(), segments=(), turns=()),
        forced(with_columns(), status=Status.ABORTED, verdict=Verdict(1.0)),
        forced(with_columns(), status=Status.FAILED),
        forced(with_columns(), failure=Failure("loop", "x")),
    ]
    verdict = Verdict(1.0)
    object.__setattr__(verdict, "score", math.nan)
    bad.append(forced(with_columns(), verdict=verdict))
    for sample in bad:
        with pytest.raises(AssertionError, match=r"^I11: "):
            check_sample(sample)


EDGES = [0, 1 << 31, 0x38000000, 0x38D1B717, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000]


def near(edge: int, distance: int) -> int:
    return (edge + distance) % 2**32


@given(bits=st.integers(0, 2**32 - 1) | st.builds(near, st.sampled_from(EDGES), st.integers(-2, 2)))
def test_every_float32_is_a_logprob_or_an_error(bits: int) -> None:
    """The columns are looked through by their bytes: no pattern may slip through, and none be refused."""
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    if math.isfinite(value) and value <= LOGPROB_ROUNDING:
        assert struct.pack("<f", Response.sampled([1], [value], 0).logprobs[0]) == struct.pack(
            "<I", bits
        )
    else:
        with pytest.raises(ValueError, match=r"logprobs\[0\] must be finite and <= 0"):
            Response.sampled([1], [value], 0)


def test_a_pickled_segment_is_trained_from_where_it_was() -> None:
    response = Response.sampled([5, 6], [-1.0, -2.0], [1, 3]).seal()
    segment = Segment(view([1]), response, trained_from=2)
    again: Segment = pickle.loads(pickle.dumps(segment))
    assert again.trained_from == 2
    assert again.mask.tolist() == segment.mask.tolist() == [0, 1]
