"""Figures of a batch that say what happened since the batch before."""

from __future__ import annotations

import anyio
import pytest

from rollnest import AsyncStrategy, Engine, Group, Sample
from rollnest.abc import Attempt
from rollnest.testing import Reply, ScriptedController

from .helpers import prompts, spec

pytestmark = pytest.mark.anyio


async def by_index(sample: Sample) -> float:
    return sample.index + 0.5


def even(group: Group) -> bool:
    return int(group.prompt.uid[1:]) % 2 == 0


async def test_rewards_are_summed_before_groups_are_filtered() -> None:
    task = spec(judger=by_index, keep=even, shuffle=False)
    async with Engine(ScriptedController(), task) as engine:
        for _ in range(2):
            figures = (await engine.next_batch(2)).statistics
            assert figures.groups == 2
            groups = 2 + figures.dropped["filtered"]
            assert groups > 2
            assert figures.produced_samples == figures.produced_rewards == 2 * groups
            assert figures.produced_reward_sum == groups * (0.5 + 1.5)
            assert figures.reward_mean == 1.0


async def test_samples_without_a_verdict_have_no_reward_in_the_sum() -> None:
    async def failing(sample: Sample) -> float:
        if sample.index and sample.prompt.uid == "p0":
            raise ValueError("no")
        return 2.0

    task = spec(judger=failing, shuffle=False)
    async with Engine(ScriptedController(), [task, spec(name="other", judger=None)]) as engine:
        batch = await engine.next_batch(4)
    figures = batch.tasks["task"]
    assert figures.dropped == {"judge": 1}
    assert (figures.produced_samples, figures.produced_rewards) == (5, 5)
    assert figures.produced_reward_sum == 10.0
    figures = batch.tasks["other"]
    assert (figures.produced_samples, figures.produced_rewards) == (4, 0)
    assert (batch.statistics.produced_samples, batch.statistics.produced_rewards) == (9, 5)
    assert batch.statistics.produced_reward_sum == 10.0


async def test_members_that_are_kept_are_counted_once() -> None:
    def script(attempt: Attempt) -> Reply:
        # p1's second member is cut by the update; the rest is done before it.
        slow = attempt.affinity.endswith("/p1/1/1")
        return Reply([5, 0], delay=100.0 if slow else 0.0)

    task = spec(
        judger=by_index,
        prompts=prompts(2),
        shuffle=False,
        epochs=1,
        strategy=AsyncStrategy(max_staleness=0),
    )
    async with Engine(ScriptedController(script), task, batch_size=2) as engine:
        await anyio.sleep(5.0)
        async with engine.paused() as pause:
            await pause.update_weights({})
        batch = await engine.next_batch()
    figures = batch.statistics
    assert figures.expired == 2  # p0, and p1's first member, were of the old weights
    assert figures.produced_samples == figures.produced_rewards == 2 + 2 + 2 + 1
    assert figures.produced_reward_sum == 2 * (0.5 + 1.5) + 0.5 + 1.5 + 0.5


async def test_time_is_counted_from_batch_to_batch_and_includes_pauses() -> None:
    controller = ScriptedController(lambda _: Reply([5, 0], delay=2.0))
    async with Engine(controller, [spec(), spec(name="other")]) as engine:
        await anyio.sleep(3.0)
        batch = await engine.next_batch(2)
        assert batch.statistics.seconds == pytest.approx(5.0)
        assert {figures.seconds for figures in batch.tasks.values()} == {batch.statistics.seconds}
        async with engine.paused():
            await anyio.sleep(4.0)
        batch = await engine.next_batch(2)
        assert batch.statistics.seconds == pytest.approx(6.0)
        assert batch.statistics.pause_seconds == pytest.approx(4.0)
