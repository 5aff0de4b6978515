"""Makes the records that every sample and every batch needs, by a shorter way than their constructors.

attrs sets each field of a frozen object through `object.__setattr__`, which takes several times as long as a plain
assignment, and a sample with its segment and its turn has 26 fields. So an object is made open, gets its fields, and
takes on its frozen class; the checks of its constructor are the same ones. The tests compare both ways, field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from ._options import Sampling
from ._records import (
    Batch,
    BatchStatistics,
    Failure,
    Group,
    Prompt,
    Sample,
    Segment,
    Status,
    Turn,
    Verdict,
)
from ._response import Response

__all__ = ["make_batch", "make_sample", "make_segment", "make_turn"]

T = TypeVar("T")


def _opened(frozen: type[T]) -> Any:
    """The same class, with fields that can be assigned to."""
    names = {
        "__slots__": (),
        "__setattr__": object.__setattr__,
        # Both fill one slot of the type, and only together they leave it the fast one.
        "__delattr__": object.__delattr__,
    }
    return type(f"Open{frozen.__name__}", (frozen,), names)


_OpenBatch = _opened(Batch)
_OpenSample = _opened(Sample)
_OpenSegment = _opened(Segment)
_OpenTurn = _opened(Turn)
_new = object.__new__


def make_turn(
    finish_reason: Literal["stop", "length", "timeout", "abort"],
    text: str | None,
    segment: int,
    start: int,
    stop: int,
    attempts: int,
    response: Response,
) -> Turn:
    """As `Turn`."""
    turn = _new(_OpenTurn)
    turn.finish_reason = finish_reason
    turn.text = text
    turn.segment = segment
    turn.start = start
    turn.stop = stop
    turn.attempts = attempts
    turn._response = response
    turn.__class__ = Turn
    made: Turn = turn
    return made


def make_segment(prompt_ids: memoryview[int], response: Response) -> Segment:
    """As `Segment`, all of which is trained."""
    segment = _new(_OpenSegment)
    segment.prompt_ids = prompt_ids
    segment.response = response
    segment.trained_from = 0
    segment.__attrs_post_init__()
    segment.__class__ = Segment
    made: Segment = segment
    return made


def make_sample(
    task: str,
    prompt: Prompt,
    visit: int,
    index: int,
    status: Status,
    segments: tuple[Segment, ...],
    turns: tuple[Turn, ...],
    finish_reason: str | None,
    verdict: Verdict | None,
    failure: Failure | None,
    sampling: Sampling,
    logprobs_mode: Literal["raw", "processed"],
    generate_seconds: float,
) -> Sample:
    """As `Sample`, of one whose loop has ended or was cut."""
    sample = _new(_OpenSample)
    sample.task = task
    sample.prompt = prompt
    sample.visit = visit
    sample.index = index
    sample.status = status
    sample.segments = segments
    sample.turns = turns
    sample.finish_reason = finish_reason
    sample.verdict = verdict
    sample.failure = failure
    sample.unjudged = False
    sample.sampling = sampling
    sample.logprobs_mode = logprobs_mode
    sample.generate_seconds = generate_seconds
    sample.__attrs_post_init__()
    sample.__class__ = Sample
    made: Sample = sample
    return made


def make_batch(
    index: int,
    version: int,
    groups: tuple[Group, ...],
    tasks: Mapping[str, BatchStatistics],
    statistics: Callable[[], BatchStatistics],
    short: bool,
) -> Batch:
    """As `Batch`, of one that is handed over for the first time."""
    batch = _new(_OpenBatch)
    batch.index = index
    batch.version = version
    batch.groups = groups
    batch.tasks = tasks
    batch._statistics = statistics
    batch.short = short
    batch.again = False
    batch.__class__ = Batch
    made: Batch = batch
    return made
