"""Redundant members: the first that complete make the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
from anyio import current_time, sleep

from rollnest import AsyncStrategy, Engine, Rollout, Sample, Sampling, Status
from rollnest.abc import Attempt
from rollnest.errors import Starved
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
)

from .helpers import cancelled_at_every_step, each_way, prompts, spec

pytestmark = pytest.mark.anyio


def by_index(attempt: Attempt) -> Reply:
    """The members' answers take 1, 2, 3 ... seconds, the last one's first."""
    index = int(attempt.affinity.rsplit("/", 1)[1])
    return Reply([5, 6, 0], delay=10.0 - index)


async def test_the_first_that_complete_are_kept_and_the_rest_is_cancelled() -> None:
    controller, recording = ScriptedController(by_index, stream=True), RecordingInstrument()
    task = spec(group_size=3, redundancy=2, epochs=1, prompts=prompts(1))
    async with Engine(controller, task, instruments=[recording]) as engine:
        batch = await engine.next_batch(1)
        assert current_time() == pytest.approx(8.0)
        assert not controller.open
        assert_conserved(engine, committed=controller.committed)
    (group,) = batch.groups
    assert [s.index for s in group.samples] == [2, 3, 4]
    figures = engine.statistics().tasks["task"]
    assert figures.members_shrunk == {"redundant": 2}
    assert (figures.members, figures.members_delivered) == (5, 3)
    assert figures.failures == {}
    assert figures.dropped == {}
    assert sorted(s.status.value for s in recording.samples) == ["aborted"] * 2 + ["completed"] * 3


async def test_of_those_that_complete_at_once_exactly_enough_are_kept() -> None:
    task = spec(group_size=2, redundancy=6)
    controller = ScriptedController(lambda _: Reply([5, 0], delay=1.0))
    async with Engine(controller, task) as engine:
        batch = await engine.next_batch(3)
    assert [len(group) for group in batch.groups] == [2, 2, 2]
    assert engine.statistics().tasks["task"].members_shrunk == {"redundant": 18}
    assert_conserved(engine, committed=controller.committed)


async def test_spare_members_make_up_for_failed_ones() -> None:
    async def loop(rollout: Rollout) -> None:
        if rollout.index in (0, 2):
            raise ValueError("no")
        await rollout.generate()

    controller = ScriptedController(rate=10.0)
    task = spec(loop=loop, group_size=2, redundancy=2, shuffle=False)
    async with Engine(controller, task) as engine:
        batch = await engine.next_batch(1)
    assert [s.index for s in batch.samples] == [1, 3]
    figures = engine.statistics().tasks["task"]
    assert figures.members_shrunk == {"loop": 2}
    assert figures.dropped == {}
    assert_conserved(engine, committed=controller.committed)


async def test_too_few_spare_members_drop_the_group() -> None:
    async def loop(rollout: Rollout) -> None:
        if rollout.index < 2:
            raise ValueError("no")
        await rollout.generate()

    controller = ScriptedController(rate=10.0)
    task = spec(loop=loop, group_size=2, redundancy=1, starve_after=1)
    async with Engine(controller, task) as engine:
        with pytest.raises(Starved):
            await engine.next_batch(1)
        assert engine.statistics().tasks["task"].dropped == {"loop": 1}
    assert_conserved(engine, committed=controller.committed)


async def test_a_member_counts_once_it_is_judged() -> None:
    async def judge(sample: Sample) -> float:
        await sleep(20.0 if sample.index == 2 else 1.0)
        return float(sample.index)

    controller = ScriptedController(by_index)
    task = spec(group_size=2, redundancy=1, judger=judge)
    async with Engine(controller, task) as engine:
        batch = await engine.next_batch(1)
        assert current_time() == pytest.approx(11.0)  # 10 + 1; the slow judge is not waited for
    assert batch.groups[0].rewards == (0.0, 1.0)
    assert_conserved(engine, committed=controller.committed)


async def test_a_judger_of_groups_sees_those_that_are_kept() -> None:
    class Ranking:
        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            return [float(len(samples) * 10 + s.index) for s in samples]

    task = spec(group_size=2, redundancy=2, judger=Ranking())
    async with Engine(ScriptedController(by_index), task) as engine:
        batch = await engine.next_batch(1)
    assert batch.groups[0].rewards == (22.0, 23.0)


async def test_groups_with_spare_members_expire_and_come_back() -> None:
    controller = ScriptedController(by_index)
    strategy = AsyncStrategy(max_staleness=0, lead=0)
    task = spec(group_size=2, redundancy=2, epochs=1, prompts=prompts(1), strategy=strategy)
    async with Engine(controller, task, batch_size=1) as engine:
        await sleep(20)
        assert engine.statistics().total("ready") == 1
        async with engine.paused() as pause:
            await pause.update_weights({})
        batch = await engine.next_batch()
        assert len(batch.groups[0]) == 2
    assert {s.status for s in batch.samples} == {Status.COMPLETED}
    figures = engine.statistics().tasks["task"]
    assert figures.members_shrunk == {"redundant": 4, "expired": 2}
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
async def test_redundancy_is_a_count(value: object) -> None:
    with pytest.raises((ValueError, TypeError), match="redundancy"):
        spec(redundancy=value)


@each_way
def test_cancelled_at_every_step(backend: Literal["asyncio", "trio"], native: bool) -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.index == 1:
            raise ValueError("no")

    def make() -> tuple[Engine, ScriptedController]:
        controller = ScriptedController(rate=10.0)
        task = spec(loop=loop, group_size=2, redundancy=2, sampling=Sampling(3), prompts=prompts(3))
        return Engine(controller, task), controller

    cancelled_at_every_step(make, lambda engine: engine.next_batch(2), backend, native)
