"""Errors go from one process to another as they are."""

from __future__ import annotations

import pickle

import pytest

from rollnest import errors
from rollnest.errors import (
    EngineBroken,
    EngineBusy,
    EvaluationCancelled,
    InferenceError,
    RollnestError,
    Starved,
    Stuck,
    WeightsState,
    WeightUpdateFailed,
)

SPECIAL: dict[str, RollnestError] = {
    "InferenceError": InferenceError("m", retryable=True, maybe_executed=False, failover=True),
    "WeightUpdateFailed": WeightUpdateFailed("m", weights=WeightsState.UNKNOWN),
    "EngineBusy": EngineBusy("m", ready=1, asked=2),
    "EngineBroken": EngineBroken("m", causes=[ValueError("v")]),
    "EvaluationCancelled": EvaluationCancelled("m", ended=1, asked=2),
    "Starved": Starved("m", task="t", reasons={"filtered": 2}, failures={"failed": "f"}),
    "Stuck": Stuck("m", version=3, counters={"t": {"ready": 1}}),
}
NAMES = [name for name in errors.__all__ if name not in ("RollnestError", "WeightsState")]


@pytest.mark.parametrize("name", NAMES)
def test_every_error_comes_back_as_it_was(name: str) -> None:
    error = SPECIAL.get(name) or getattr(errors, name)("m")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "m"
    held, was = dict(vars(again)), dict(vars(error))
    assert [repr(cause) for cause in held.pop("causes", ())] == [
        repr(cause) for cause in was.pop("causes", ())
    ]
    assert held == was
