"""Records that the engine makes without attrs' constructors are the ones that these would have made."""

import pickle
from array import array
from inspect import signature
from typing import Any

import pytest
from attrs import evolve, fields
from attrs.exceptions import FrozenInstanceError

from rollnest import Batch, Failure, Group, Prompt, Sample, Sampling, Segment, Status, Turn, Verdict
from rollnest._making import make_batch, make_sample, make_segment, make_turn
from rollnest._response import Response

RESPONSE = Response.sampled([1, 2], [-1.0, -0.5], 3).seal()
IDS = memoryview(array("i", [7, 8])).toreadonly()
PROMPT = Prompt("p", token_ids=[7, 8])
TURN = Turn("stop", "text", 1, 2, 4, 5, RESPONSE)
SEGMENT = Segment(IDS, RESPONSE)
SAMPLE = Sample(
    task="t",
    prompt=PROMPT,
    visit=1,
    index=2,
    status=Status.COMPLETED,
    segments=(SEGMENT,),
    turns=(TURN,),
    finish_reason="stop",
    verdict=Verdict(0.5),
    sampling=Sampling(9),
    logprobs_mode="raw",
    generate_seconds=1.5,
)
GROUP = Group("t", PROMPT, 1, [SAMPLE])


def statistics() -> Any:
    raise AssertionError("nobody looks at them")


BATCH = Batch(index=4, version=3, groups=[GROUP], tasks={}, statistics=statistics, short=True)


def made_sample(**changes: Any) -> Sample:
    """A copy of `SAMPLE`, with changes."""
    names = signature(make_sample).parameters
    return make_sample(**{name: getattr(SAMPLE, name) for name in names} | changes)


PAIRS = [
    (TURN, make_turn("stop", "text", 1, 2, 4, 5, RESPONSE)),
    (SEGMENT, make_segment(IDS, RESPONSE)),
    (SAMPLE, made_sample()),
    (BATCH, make_batch(4, 3, (GROUP,), BATCH.tasks, statistics, True)),
]


@pytest.mark.parametrize(("built", "made"), PAIRS, ids=lambda record: type(record).__name__)
def test_made_and_built_are_alike_in_every_field(built: Any, made: Any) -> None:
    assert type(made) is type(built)
    names = [attribute.name for attribute in fields(type(built))]
    assert names
    for name in names:
        here, there = getattr(made, name), getattr(built, name)
        assert here is there or here == there
    assert repr(made) == repr(built)


@pytest.mark.parametrize("made", [made for _, made in PAIRS], ids=lambda made: type(made).__name__)
def test_what_was_made_is_frozen(made: Any) -> None:
    name = fields(type(made))[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(made, name, None)
    with pytest.raises(FrozenInstanceError):
        delattr(made, name)
    with pytest.raises(AttributeError):
        made.anything = 1


def test_what_was_made_can_be_pickled_and_changed() -> None:
    sample = pickle.loads(pickle.dumps(made_sample()))
    assert type(sample) is Sample
    assert sample.uid == SAMPLE.uid
    assert sample.segments[0].ids.tolist() == [1, 2]
    assert evolve(made_sample(), status=Status.FILTERED).status is Status.FILTERED
    assert len(pickle.loads(pickle.dumps(TURN))) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segments": ()}, "needs at least one token"),
        ({"status": Status.ABORTED}, "carry no verdict"),
        ({"status": Status.FAILED, "verdict": None}, "carry a failure"),
        ({"failure": Failure("loop", "no")}, "carry a failure"),
    ],
)
def test_what_must_not_exist_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made_sample(**changes)


def test_a_segment_that_still_grows_is_refused() -> None:
    with pytest.raises(ValueError, match="sealed"):
        make_segment(IDS, Response.sampled([1], [-1.0], 0))
