"""Dynamic sampling: which groups a user's filter keeps, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from rollnest import AsyncStrategy, Batch, Engine, Group, Sample, Status
from rollnest.errors import Starved
from rollnest.testing import RecordingInstrument, ScriptedController, assert_conserved

from .helpers import prompts, run_to_its_exit, spec

pytestmark = pytest.mark.anyio


def has_spread(group: Group) -> bool:
    return len(set(group.rewards)) > 1


def by_uid(sample: Sample) -> float:
    """Spread in groups of even prompts only."""
    even = int(sample.prompt.uid[1:]) % 2 == 0
    return float(sample.index) if even else 0.0


async def judge(sample: Sample) -> float:
    return by_uid(sample)


async def test_groups_that_are_not_kept_are_dropped_and_replaced() -> None:
    recording = RecordingInstrument()
    controller = ScriptedController(rate=10.0)
    task = spec(judger=judge, keep=has_spread, shuffle=False)
    async with Engine(controller, task, instruments=[recording]) as engine:
        batch = await engine.next_batch(3)
    assert [group.prompt.uid for group in batch.groups] == ["p0", "p2", "p4"]
    figures = engine.statistics().tasks["task"]
    assert figures.dropped == batch.statistics.dropped == {"filtered": figures.drawn - 3}
    dropped = [group for group, outcome in recording.groups if outcome == "filtered"]
    assert {s.status for group in dropped for s in group.samples} == {Status.FILTERED}
    assert all(s.verdict is not None for group in dropped for s in group.samples)
    assert_conserved(engine, committed=controller.committed)


async def test_bug_026_the_filter_sees_completed_groups_only() -> None:
    seen: list[Group] = []

    def keep(group: Group) -> bool:
        seen.append(group)
        return False

    async def judge_or_fail(sample: Sample) -> float:
        if sample.prompt.uid == "p1":
            raise ValueError("no")
        return 1.0

    controller = ScriptedController(rate=1.0, stop_every=10_000)
    task = spec(judger=judge_or_fail, keep=keep, prompts=prompts(2), epochs=1)
    async with Engine(controller, task) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(_take, engine)
            await anyio.sleep(10)
            async with engine.paused():  # cuts both groups; they go on afterwards
                assert seen == []
            await anyio.sleep(100)
            group.cancel_scope.cancel()
    assert [g.prompt.uid for g in seen] == ["p0"]
    assert seen[0].status is Status.COMPLETED
    assert engine.statistics().tasks["task"].dropped == {"filtered": 1, "judge": 1}


async def _take(engine: Engine) -> None:
    async for _ in engine.batches(1):
        pass


async def test_a_filter_that_keeps_nothing_starves() -> None:
    for strategy, batch_size in ((None, None), (AsyncStrategy(), 2)):
        options: dict[str, Any] = {} if strategy is None else {"strategy": strategy}
        task = spec(keep=lambda _: False, starve_after=3, **options)
        async with Engine(ScriptedController(), task, batch_size=batch_size) as engine:
            with pytest.raises(Starved, match="filtered") as caught:
                await engine.next_batch(2)
            assert set(caught.value.reasons) == {"filtered"}


@pytest.mark.parametrize("answer", [None, "yes", 2, [True]])
async def test_a_filter_that_answers_no_bool_fails_the_group(answer: object) -> None:
    task = spec(keep=lambda _: answer, starve_after=1)
    async with Engine(ScriptedController(), task) as engine:
        with pytest.raises(Starved, match="keep must answer a bool") as caught:
            await engine.next_batch(1)
        assert set(caught.value.reasons) == {"filter"}


async def test_a_filter_that_raises_fails_the_group() -> None:
    def keep(group: Group) -> bool:
        raise ZeroDivisionError("spread")

    async with Engine(ScriptedController(), spec(keep=keep, starve_after=1)) as engine:
        with pytest.raises(Starved, match="ZeroDivisionError: spread"):
            await engine.next_batch(1)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_filter_that_exits_leaves_no_row_in_flight(
    backend: str, error: type[BaseException]
) -> None:
    def keep(group: Group) -> bool:
        raise error

    async def main() -> None:
        async with engine:
            await engine.next_batch(1)

    engine = Engine(ScriptedController(), spec(keep=keep))
    run_to_its_exit(main, backend, error)
    figures = engine.statistics().tasks["task"]
    assert (figures.flight, figures.dropped["filter"]) == (0, 1)
    assert_conserved(engine)


async def test_numpy_bools_are_bools() -> None:
    got: list[Batch] = []
    async with Engine(ScriptedController(), spec(keep=lambda _: np.True_)) as engine:
        got.append(await engine.next_batch(2))
    assert len(got[0]) == 2


async def test_a_filter_that_is_no_function() -> None:
    with pytest.raises(TypeError, match="keep"):
        spec(keep=True)
