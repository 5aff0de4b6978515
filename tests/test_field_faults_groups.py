"""Field faults of groups, batches, staleness and several tasks; the numbers are those of the case texts."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
from anyio import create_task_group, current_time, move_on_after, sleep

from rollnest import AsyncStrategy, Engine, Prompt, Rollout, Sample, Status, SyncStrategy
from rollnest.abc import Attempt
from rollnest.errors import EndOfPrompts, EngineBusy
from rollnest.testing import RecordingInstrument, Reply, ScriptedController, assert_conserved

from .helpers import one_batch, prompts, spec

pytestmark = pytest.mark.anyio


async def test_bug_035_a_group_with_an_empty_member_never_reaches_the_trainer() -> None:
    def script(attempt: Attempt) -> Reply:
        empty = attempt.prompt_ids[0] == 1 and attempt.affinity.endswith("/2")
        return Reply([] if empty else [5, 0])

    task = spec(group_size=4, shuffle=False)
    batch, engine = await one_batch(ScriptedController(script), task, 2)
    assert [len(group) for group in batch.groups] == [4, 4]
    assert [group.prompt.uid for group in batch.groups] == ["p1", "p2"]
    assert engine.statistics().tasks["task"].dropped == {"inference": 1}


async def test_bug_036_a_prompt_that_always_fails_is_given_up() -> None:
    tries: Counter[str] = Counter()

    async def loop(rollout: Rollout) -> None:
        tries[rollout.prompt.uid] += 1
        if rollout.prompt.uid == "p0":
            raise OSError("poisoned")
        await rollout.generate()

    task = spec(loop=loop, group_size=1, shuffle=False, prompts=prompts(5), epochs=1)
    batch, _ = await one_batch(ScriptedController(), task, 4)
    assert [group.prompt.uid for group in batch.groups] == ["p1", "p2", "p3", "p4"]
    assert tries["p0"] == 1


async def test_bug_037_exactly_the_oldest_are_taken_and_the_rest_stays() -> None:
    task = spec(group_size=1, shuffle=False, strategy=AsyncStrategy(lead=9))
    async with Engine(ScriptedController(), task, batch_size=1) as engine:
        await sleep(1)
        assert engine.statistics().total("ready") == 10
        batch = await engine.next_batch(4)
        assert engine.statistics().total("ready") == 6
        assert [group.visit for group in batch.groups] == [0, 1, 2, 3]
        rest = await engine.next_batch(6)
        assert [group.visit for group in rest.groups] == [4, 5, 6, 7, 8, 9]


async def test_bug_038_n_is_applied_once() -> None:
    controller = ScriptedController()
    await one_batch(controller, spec(prompts=prompts(2), epochs=1, group_size=3), 2)
    assert len(controller.prompts) == 6


async def test_bug_039_equal_uids_of_two_tasks_are_two_groups() -> None:
    async def judge(sample: Sample) -> float:
        return 1.0 if sample.task == "b" else 0.0

    tasks = [spec(name=name, prompts=prompts(1), judger=judge, epochs=1) for name in ("a", "b")]
    batch, _ = await one_batch(ScriptedController(), tasks, 2)
    rewards = {(g.task, g.visit): g.rewards for g in batch.groups}
    assert rewards == {("a", 0): (0.0, 0.0), ("b", 0): (1.0, 1.0)}
    assert batch.statistics.zero_variance_share == 1.0


async def test_bug_043_a_batch_that_can_not_fill_any_more_is_short() -> None:
    async def judge(sample: Sample) -> float:
        if sample.prompt.uid in ("p1", "p2"):
            raise ValueError("unusable")
        return 1.0

    task = spec(prompts=prompts(4), judger=judge, epochs=1)
    async with Engine(ScriptedController(), task) as engine:
        batch = await engine.next_batch(4)
        assert (len(batch), batch.short) == (2, True)
        assert batch.statistics.dropped == {"judge": 2}
        with pytest.raises(EndOfPrompts):
            await engine.next_batch(4)


async def test_bug_069_exactly_the_stale_groups_expire() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy(max_staleness=0, lead=1), shuffle=False)
    async with Engine(controller, task, batch_size=2) as engine:
        await sleep(10)
        assert engine.statistics().total("ready") == 4
        async with engine.paused() as pause:
            await pause.update_weights({})
        batch = await engine.next_batch()
        figures = engine.statistics().tasks["task"]
        assert figures.expired == 4
        assert set(batch.statistics.lag_histogram) == {0}
        await sleep(10)
        assert engine.statistics().total("expired") == 4
    assert_conserved(engine, committed=controller.committed)


async def test_bug_071_slow_prompts_reach_batches() -> None:
    def script(attempt: Attempt) -> Reply:
        return Reply([5, 0], delay=3.0 if attempt.prompt_ids[0] <= 3 else 1.0)

    controller = ScriptedController(script)
    task = spec(prompts=prompts(6), group_size=1, strategy=AsyncStrategy(max_staleness=2, lead=2))
    trained: Counter[str] = Counter()
    async with Engine(controller, task, batch_size=2) as engine:
        for _ in range(30):
            batch = await engine.next_batch()
            trained.update(group.prompt.uid for group in batch.groups)
            assert max(batch.statistics.lag_histogram) <= 2
            await sleep(1)
            async with engine.paused() as pause:
                await pause.update_weights({})
        assert engine.statistics().tasks["task"].expired >= 0
    assert set(trained) == {f"p{i}" for i in range(6)}
    assert_conserved(engine, committed=controller.committed)


async def test_bug_076_no_prompt_is_dropped_between_two_requests() -> None:
    task = spec(prompts=prompts(8), shuffle=False, epochs=1)
    async with Engine(ScriptedController(), task) as engine:
        batches = [await engine.next_batch(3), await engine.next_batch(3)]
    uids = [[group.prompt.uid for group in batch.groups] for batch in batches]
    assert uids == [["p0", "p1", "p2"], ["p3", "p4", "p5"]]


async def test_bug_082_what_was_trained_is_let_go() -> None:
    alive: weakref.WeakSet[Sample] = weakref.WeakSet()
    async with Engine(ScriptedController(), spec(), batch_size=2) as engine:
        for _ in range(100):
            batch = await engine.next_batch()
            for sample in batch.samples:
                alive.add(sample)
        del batch, sample
        gc.collect()
        assert len(alive) <= 8  # the batch that was not committed yet


async def test_bug_079_what_expired_for_good_is_let_go() -> None:
    alive: weakref.WeakSet[Sample] = weakref.WeakSet()

    class Watching(RecordingInstrument):
        def sample_ended(self, sample: Sample) -> None:
            alive.add(sample)

        def group_ended(self, group: object, outcome: str) -> None:
            pass

    task = spec(strategy=AsyncStrategy(max_staleness=0, lead=9), epochs=1, prompts=prompts(10))
    controller = ScriptedController()
    async with Engine(controller, task, batch_size=1, instruments=[Watching()]) as engine:
        for _ in range(4):
            await sleep(1)
            async with engine.paused() as pause:
                await pause.update_weights({})
                with pytest.raises((EngineBusy, EndOfPrompts)):
                    await engine.next_batch()
        gc.collect()
        assert engine.statistics().tasks["task"].dropped == {"expired": 10}
        assert not alive
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.parametrize(
    ("weights", "batch", "steps", "total"),
    [((1 / 3, 2 / 3), 4, 3, (4, 8)), ((0.1, 0.9), 2, 10, (2, 18))],
)
async def test_bug_105_a_small_weight_is_served_in_the_long_run(
    weights: tuple[float, float], batch: int, steps: int, total: tuple[int, int]
) -> None:
    tasks = [spec(name=n, weight=w) for n, w in zip("ab", weights, strict=True)]
    got = Counter[str]()
    async with Engine(ScriptedController(), tasks, batch_size=batch) as engine:
        for _ in range(steps):
            taken = await engine.next_batch()
            assert len(taken) == batch
            got.update(group.task for group in taken.groups)
    assert (got["a"], got["b"]) == total


async def test_bug_065_the_last_batch_does_not_wait_for_a_version() -> None:
    task = spec(prompts=prompts(6), epochs=1, strategy=AsyncStrategy(max_staleness=1, lead=0))
    async with Engine(ScriptedController(rate=10.0), task, batch_size=2) as engine:
        assert len(await engine.next_batch()) == 2
        async with engine.paused() as pause:
            await pause.update_weights({})
        assert len(await engine.next_batch()) == 2
        assert len(await engine.next_batch()) == 2  # no version 2 ever comes


async def test_a_batch_larger_than_the_prompts_visits_them_again_or_ends() -> None:
    batch, _ = await one_batch(ScriptedController(), spec(prompts=prompts(2)), 5)
    assert [g.visit for g in batch.groups] == [0, 1, 2, 3, 4]
    batch, _ = await one_batch(ScriptedController(), spec(prompts=prompts(2), epochs=1), 5)
    assert (len(batch), batch.short) == (2, True)


async def test_a_huge_group_is_one_group() -> None:
    batch, engine = await one_batch(ScriptedController(), spec(group_size=500))
    assert [s.index for s in batch.groups[0].samples] == list(range(500))
    assert_conserved(engine)


async def test_the_end_comes_also_if_everything_was_dropped() -> None:
    async def loop(rollout: Rollout) -> None:
        raise OSError("down")

    task = spec(loop=loop, prompts=prompts(3), epochs=1)
    async with Engine(ScriptedController(), task) as engine:
        with pytest.raises(EndOfPrompts):
            await engine.next_batch(2)
    assert engine.statistics().tasks["task"].dropped == {"loop": 3}


async def test_a_task_that_ends_while_another_waits_hands_over_its_share() -> None:
    async def loop(rollout: Rollout) -> None:
        await sleep(1)
        raise OSError("down")

    tasks = [
        spec(name="dying", loop=loop, prompts=prompts(2), epochs=1),
        spec(name="alive", strategy=SyncStrategy()),
    ]
    batch, _ = await one_batch(ScriptedController(), tasks, 4)
    assert (batch.tasks["alive"].groups, batch.short) == (4, False)


async def test_a_consumer_in_a_task_of_its_own() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(prompts=prompts(10), epochs=1, strategy=AsyncStrategy(max_staleness=3))
    seen: list[int] = []

    async def consume(engine: Engine) -> None:
        try:
            while True:
                batch = await engine.next_batch(wait_in_pause=True)
                seen.extend(group.visit for group in batch.groups)
        except EndOfPrompts:
            pass

    async with Engine(controller, task, batch_size=2) as engine, create_task_group() as group:
        group.start_soon(consume, engine)
        for _ in range(3):
            await sleep(1)
            async with engine.paused() as pause:
                await pause.update_weights({})
    assert sorted(seen) == list(range(10))


async def test_a_wait_that_is_cancelled_takes_nothing() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(prompts=prompts(6), epochs=1)
    async with Engine(controller, task) as engine:
        seen: list[int] = []
        while len(seen) < 6:
            with move_on_after(0.1):
                batch = await engine.next_batch(1)
                seen.extend(group.visit for group in batch.groups)
    assert sorted(seen) == list(range(6))
    assert_conserved(engine, committed=controller.committed)


async def test_a_pause_in_the_first_step_and_during_judging() -> None:
    judging: list[Sample] = []

    async def judge(sample: Sample) -> float:
        judging.append(sample)
        await sleep(5)
        return 1.0

    controller = ScriptedController()
    async with Engine(controller, spec(judger=judge), batch_size=1) as engine:
        async with engine.paused():
            await sleep(1)
            assert controller.prompts == []
        async with create_task_group() as group:
            group.start_soon(engine.next_batch, 1)
            await sleep(1)
            assert len(judging) == 2
            before = current_time()
            async with engine.paused() as pause:
                assert pause.quiet_seconds == 0
                await sleep(10)  # judging goes on meanwhile
                assert engine.statistics().total("delivered") == 1
            assert current_time() - before == 10
    assert {s.status for s in judging} == {Status.COMPLETED}


async def test_paused_may_be_made_and_never_entered_or_entered_again() -> None:
    async with Engine(ScriptedController(), spec()) as engine:
        engine.paused()
        context = engine.paused()
        for version in (1, 2):
            async with context as pause:
                await pause.update_weights({})
            assert engine.version == version
        assert len(await engine.next_batch(1)) == 1


async def test_prompts_of_one_uid_are_told_apart_by_their_visit() -> None:
    task = spec(prompts=[Prompt("p", token_ids=[1])], group_size=1)
    batch, _ = await one_batch(ScriptedController(), task, 3)
    assert [(g.prompt.uid, g.visit) for g in batch.groups] == [("p", 0), ("p", 1), ("p", 2)]
