"""Checks a frozen sample against the invariants, by other means than the records' own.

Every column is walked token by token; nothing is trusted that a constructor or an `append` has checked already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollnest._records import Sample, Segment, Status, Turn

__all__ = ["check_sample"]

_ROUNDING = 1e-4  # a server's, of a logprob above 0


def check_sample(sample: Sample, *, max_response_tokens: int | None = None) -> None:
    """Checks what must hold of every sample, however it was made: I1 to I5 and I11 of the design.

    - I1: ids, origin, mask, logprobs and versions have one length.
    - I2: context has no version and logprob 0.0; only the policy's tokens are trained.
    - I3: the policy's logprobs are finite and not above 0; versions never decrease.
    - I4: each turn is an unbroken run of the policy's tokens, after the turns before it; what is in the turn is what
      is in the segment. All the policy's tokens of a completed sample are some turn's.
    - I5: the response is within its cap; a turn without a token ended because there was no room.
    - I11: a completed sample has a token of the policy and a finite verdict or none; others carry no verdict, and
      exactly the failed ones a failure.

    Args:
        sample: The sample.
        max_response_tokens: The task's cap of all responses of a sample; `None` leaves it unchecked.

    Raises:
        AssertionError: One doesn't hold; the message names it and where.
    """
    for at, segment in enumerate(sample.segments):
        _check_columns(segment, f"segments[{at}]")
    _check_turns(sample)
    _check_outcome(sample)
    if max_response_tokens is not None:
        length = sum(len(segment.ids) for segment in sample.segments)
        _hold("I5", length <= max_response_tokens, f"{length} tokens of {max_response_tokens}")


def _hold(invariant: str, holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(f"{invariant}: {message}")


def _check_columns(segment: Segment, where: str) -> None:
    ids, origin = list(segment.ids), list(segment.response.origin)
    mask, logprobs = list(segment.mask), list(segment.logprobs)
    versions = list(segment.versions)
    lengths = [len(ids), len(origin), len(mask), len(logprobs), len(versions)]
    _hold("I1", len(set(lengths)) == 1, f"{where} has columns of the lengths {lengths}")
    _hold("I1", len(segment) == len(ids), f"{where} says it has {len(segment)} tokens")
    newest = 0
    columns = zip(ids, origin, mask, logprobs, versions, strict=True)
    for at, (token, made_by, trained, logprob, version) in enumerate(columns):
        here = f"{where} token {at}"
        _hold("I1", token >= 0, f"{here} has the id {token}")
        _hold("I2", made_by in (0, 1), f"{here} has the origin {made_by}")
        _hold("I2", trained in (0, 1), f"{here} has the mask {trained}")
        if made_by == 0:
            _hold("I2", trained == 0, f"{here} is context and trained")
            _hold("I2", version == -1, f"{here} is context and has the version {version}")
            _hold("I2", logprob == 0.0, f"{here} is context and has the logprob {logprob}")
        else:
            _hold("I2", version >= 0, f"{here} is the policy's and has the version {version}")
            _hold("I3", math.isfinite(logprob), f"{here} has the logprob {logprob}")
            _hold("I3", logprob <= _ROUNDING, f"{here} has the logprob {logprob}")
            _hold("I3", version >= newest, f"{here} has the version {version} after {newest}")
            newest = version
    _hold("I1", all(token >= 0 for token in segment.prompt_ids), f"{where} prompt has an id < 0")


def _check_turns(sample: Sample) -> None:
    in_turns = [[False] * len(segment.ids) for segment in sample.segments]
    ends = [0] * len(sample.segments)
    for number, turn in enumerate(sample.turns):
        where = f"turns[{number}]"
        _hold("I4", 0 <= turn.segment < len(ends), f"{where} is in segment {turn.segment}")
        columns = sample.segments[turn.segment]
        at = f"{where} at {turn.start}:{turn.stop}"
        _hold("I4", turn.start <= turn.stop <= len(columns.ids), f"{at} of {len(columns.ids)}")
        _hold("I4", turn.start >= ends[turn.segment], f"{at} begins before the last one's end")
        ends[turn.segment] = turn.stop
        _check_turn(turn, columns, at)
        for i in range(turn.start, turn.stop):
            in_turns[turn.segment][i] = True
    if sample.status is Status.COMPLETED:
        for number, segment in enumerate(sample.segments):
            _check_owned(segment.response.origin, in_turns[number], f"segments[{number}]")


def _check_turn(turn: Turn, segment: Segment, at: str) -> None:
    part = slice(turn.start, turn.stop)
    _hold("I4", list(turn.ids) == list(segment.ids)[part], f"{at} has other ids than its segment")
    _hold("I4", all(list(segment.response.origin)[part]), f"{at} has a token of the context")
    _hold("I4", turn.attempts >= 0, f"{at} took {turn.attempts} attempts")
    _hold("I5", turn.stop > turn.start or turn.finish_reason == "length", f"{at} is empty")


def _check_owned(origin: Sequence[int], in_turn: Sequence[bool], where: str) -> None:
    for at, (made_by, owned) in enumerate(zip(origin, in_turn, strict=True)):
        _hold("I4", owned or made_by == 0, f"{where} token {at} is the policy's and in no turn")


def _check_outcome(sample: Sample) -> None:
    status, verdict = sample.status, sample.verdict
    if status is Status.COMPLETED:
        sampled = sum(sum(segment.response.origin) for segment in sample.segments)
        _hold("I11", sampled > 0, "it is COMPLETED without a token of the policy")
    if status not in (Status.COMPLETED, Status.FILTERED):
        _hold("I11", verdict is None, f"it is {status.name} and carries {verdict}")
    if verdict is not None:
        _hold("I11", math.isfinite(verdict.score), f"its score is {verdict.score}")
    failed = status is Status.FAILED
    _hold("I11", (sample.failure is not None) == failed, f"{status.name} with {sample.failure}")
