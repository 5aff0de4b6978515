"""Figures of a batch that say what happened since the batch before."""

from __future__ import annotations

import copy
import pickle

import anyio
import pytest

from rollnest import AsyncStrategy, Batch, BatchStatistics, Engine, Group, Sample
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
        strategy=AsyncStrategy(max_staleness=0, lead=0),
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


async def test_every_figure_of_what_is_left_and_what_happened() -> None:
    """What XTuner's `ProduceBatchResult` says, and more; over several tasks it is the sum or the union."""

    async def judge(sample: Sample) -> float:
        if sample.prompt.uid == "p1":
            raise ValueError("unusable")
        return float(sample.index)

    def script(attempt: Attempt) -> Reply:
        return Reply([5, 0], delay=float(attempt.prompt_ids[0]))

    first = spec(name="a", judger=judge, keep=lambda g: g.prompt.uid != "p2", shuffle=False)
    second = spec(name="b", prompts=prompts(3), shuffle=False, epochs=1)
    async with Engine(ScriptedController(script), [first, second]) as engine:
        batch = await engine.next_batch(8)
        a, b, both = batch.tasks["a"], batch.tasks["b"], batch.statistics
        assert (a.groups, a.asked, b.groups, b.asked, both.asked) == (4, 4, 3, 4, 8)
        assert (b.asked, batch.short) == (4, True)
        assert (a.failed_samples, a.filtered_samples) == (2, 2)
        assert (both.failed_samples, both.filtered_samples) == (2, 2)
        assert a.dropped == both.dropped == {"judge": 1, "filtered": 1}
        assert b.group_seconds_p50 == 2.0
        assert b.group_seconds_p99 == 3.0
        assert b.group_seconds_ratio == 1.5
        # Of the union (1, 1, 2, 3, 4, 5, 6), not the mean of two medians.
        assert both.group_seconds_p50 == 3.0
        assert (both.seconds, both.pause_seconds) == (9.0, 0.0)
        assert (both.ready, both.waiting, both.flight) == (0, 0, 0)
    assert BatchStatistics().group_seconds_ratio is None


async def test_groups_that_wait_are_told_apart_and_restarts_counted() -> None:
    task = spec(strategy=AsyncStrategy(max_staleness=0, lead=1, expired="tail", tail_batch=9))
    async with Engine(ScriptedController(rate=10.0), task, batch_size=2) as engine:
        await anyio.sleep(100)
        async with engine.paused() as pause:
            await pause.update_weights({})
        figures = (await engine.next_batch()).statistics
        assert (figures.waiting, figures.waiting_expired, figures.expired) == (4, 4, 4)
        assert figures.redrawn == 0
        await anyio.sleep(100)
        for _ in range(2):
            async with engine.paused() as pause:
                await pause.update_weights({})
            await anyio.sleep(100)
        figures = (await engine.next_batch()).statistics
        assert figures.redrawn == engine.statistics().total("redrawn") > 0


async def test_totals_only_rise_through_pauses_expiry_and_batches() -> None:
    task = spec(
        strategy=AsyncStrategy(max_staleness=0, lead=1), keep=lambda group: group.visit % 3 > 0
    )
    names = ["drawn", "redrawn", "delivered", "expired", "produced_samples", "tokens_committed"]
    before = dict.fromkeys(names, 0)
    async with Engine(ScriptedController(rate=10.0), task, batch_size=2) as engine:
        for _ in range(5):
            await engine.next_batch()
            await anyio.sleep(7.0)
            async with engine.paused() as pause:
                await pause.update_weights({})
            now = {name: engine.statistics().total(name) for name in names}
            assert all(now[name] >= before[name] for name in names)
            before = now
    assert all(before.values())


@pytest.mark.parametrize("tasks", [1, 2])
async def test_figures_are_of_the_moment_the_batch_was_taken_whenever_they_are_looked_at(
    tasks: int,
) -> None:
    async def run(*, look: bool) -> list[tuple[object, ...]]:
        specs = [spec(name=name) for name in "ab"[:tasks]]
        async with Engine(ScriptedController(), specs, batch_size=4) as engine:
            batches: list[Batch] = []
            for _ in range(3):
                batches.append(await engine.next_batch())
                if look:
                    repr((batches[-1].statistics, dict(batches[-1].tasks)))
                await anyio.sleep(1)
        return [(batch.statistics, dict(batch.tasks)) for batch in batches]

    assert await run(look=False) == await run(look=True)


async def test_a_batch_is_pickled_with_its_figures() -> None:
    async with Engine(ScriptedController(), [spec(name="a"), spec(name="b")]) as engine:
        batch = await engine.next_batch(4)
    again = pickle.loads(pickle.dumps(batch))
    assert again.statistics == batch.statistics
    assert again.tasks == dict(batch.tasks)
    assert (again.index, again.version, again.short, again.again, len(again)) == (
        1,
        0,
        False,
        False,
        4,
    )
    assert copy.copy(batch).statistics is batch.statistics
