"""Raw and processed logprobs are never in one training batch."""

from __future__ import annotations

from array import array
from typing import Any, Literal

import pytest

from rollnest import Group, Prompt, Response, Sample, Segment, Status, Verdict
from rollnest_adapters.torch import pack, pad

ADVANTAGES = {("maths", 0): [1.0], ("maths", 1): [1.0]}


def group(visit: int, mode: Literal["raw", "processed"]) -> Group:
    """A group of one sample, whose logprobs are of one mode."""
    response = Response()
    response.append_policy([2], [-0.5], 0)
    sample = Sample(
        task="maths",
        prompt=Prompt("p", token_ids=[1]),
        visit=visit,
        index=0,
        status=Status.COMPLETED,
        segments=(Segment(memoryview(array("i", [1])).toreadonly(), response.seal()),),
        verdict=Verdict(1.0),
        logprobs_mode=mode,
    )
    return Group("maths", sample.prompt, visit, (sample,))


@pytest.mark.parametrize("make", [pack, pad])
def test_bug_099_raw_and_processed_logprobs_are_not_mixed(make: Any) -> None:
    mixed = [group(0, "processed"), group(1, "raw")]
    with pytest.raises(ValueError, match="sample maths/1/0 has raw logprobs and others have"):
        make(mixed, ADVANTAGES)
    make(mixed[:1], ADVANTAGES)
    make(mixed[1:], ADVANTAGES)
