"""Turns a completed sample into a judged one.

A judger never stalls the event loop: a sync one runs in a worker thread, within the engine's bound and the
task's limit. Anything but a usable answer makes the sample FAILED with its cause, never reward 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import iscoroutinefunction
from typing import Any, cast

from attrs import evolve

from ._gate import Gate, OverLimit
from ._records import Failure, Sample, Status, Verdict
from ._slots import Slots
from ._workers import Workers
from .abc import Judger, JudgerLike
from .errors import JudgeError

__all__ = ["Judging", "as_verdict"]


class Judging:
    """The judger of one task."""

    def __init__(
        self,
        judger: JudgerLike,
        *,
        gate: Gate,
        slots: Slots,
        workers: Workers,
        limit: float | None,
    ) -> None:
        self._judge = cast(
            "Callable[[Sample], Any]", judger.judge if isinstance(judger, Judger) else judger
        )
        self._is_async = iscoroutinefunction(self._judge) or iscoroutinefunction(
            getattr(self._judge, "__call__", None)  # noqa: B004
        )
        self._gate = gate
        self._slots = slots
        self._workers = workers
        self._limit = limit

    async def judge(self, sample: Sample) -> Sample:
        """Returns the sample with its verdict, or FAILED with what went wrong.

        Cancellation: an async judger is cancelled; a sync one's thread is abandoned. The sample stays unjudged.
        """
        try:
            return evolve(sample, verdict=as_verdict(await self._ask(sample)))
        except OverLimit:
            return _failed(sample, JudgeError(f"the judger took over {self._limit} s"))
        except Exception as error:
            return _failed(sample, error)

    async def _ask(self, sample: Sample) -> Any:
        limit = self._gate.limit(self._limit)
        if self._is_async:
            async with self._slots:
                with limit:  # waiting for the slot is not judging
                    return await self._judge(sample)
        name = f"judger of {sample.task}/{sample.prompt.uid}"
        return await self._workers.run(
            name, self._slots, limit, self._judge, sample, patience=self._limit
        )


def as_verdict(answer: object) -> Verdict:
    """Returns a judger's answer as a verdict.

    Takes a `Verdict`, a number, a bool, a numpy or torch scalar, or a mapping with `score` (what else it holds becomes
    the verdict's details).

    Raises:
        JudgeError: It is none of these, or not finite.
    """
    if isinstance(answer, Verdict):
        return answer
    if isinstance(answer, Mapping):
        mapping = cast("Mapping[str, Any]", answer)
        if "score" not in mapping:
            raise JudgeError(f"the judger's mapping has no 'score', only {sorted(mapping)}")
        details = {key: value for key, value in mapping.items() if key != "score"}
        return Verdict(_score(mapping["score"]), details=details)
    return Verdict(_score(answer))


def _score(value: object) -> float:
    number = value
    if not isinstance(value, bool | int | float | str) and hasattr(value, "item"):
        try:
            number = cast("Any", value).item()  # a numpy or torch scalar
        except (ValueError, TypeError, RuntimeError):
            number = None  # more than one element
    if not isinstance(number, bool | int | float):
        raise JudgeError(f"the judger answered {value!r}, which is no score")
    score = float(number)
    if not math.isfinite(score):
        raise JudgeError(f"the judger answered {value!r}, a score must be finite")
    return score


def _failed(sample: Sample, error: BaseException) -> Sample:
    return evolve(sample, status=Status.FAILED, verdict=None, failure=Failure.of("judge", error))
