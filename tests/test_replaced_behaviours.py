"""Behaviours that the tests of the replaced system assert, with its figures where they mean something here.

The list of them all, and which test holds which, is `tests/data/xtuner_tests.toml`.
"""

from __future__ import annotations

import threading

import anyio
import pytest
from anyio.lowlevel import checkpoint

from rollnest import AsyncStrategy, Engine, Prompt, Rollout, SyncStrategy
from rollnest.abc import Attempt, Instrument
from rollnest.errors import EngineBusy
from rollnest.testing import Reply, ScriptedController, assert_conserved, check_sample

from .helpers import spec

pytestmark = pytest.mark.anyio


async def test_seven_groups_by_two_to_one_to_nothing() -> None:
    names = {"a": 2.0, "b": 1.0, "c": 0.0}
    tasks = [spec(name=name, weight=weight) for name, weight in names.items()]
    async with Engine(ScriptedController(), tasks) as engine:
        batch = await engine.next_batch(7)
        assert {name: figures.groups for name, figures in batch.tasks.items()} == {
            "a": 5,
            "b": 2,
            "c": 0,
        }
        # The fractions that were rounded off are owed: two batches later it is exact.
        for _ in range(2):
            await engine.next_batch(7)
    figures = engine.statistics().tasks
    assert [figures[name].delivered for name in names] == [14, 7, 0]
    assert figures["c"].drawn == 0


async def test_what_is_left_is_told_for_each_task_and_summed() -> None:
    def script(attempt: Attempt) -> Reply:
        return Reply([5, 0], delay=50.0 if attempt.affinity.startswith("slow") else 1.0)

    ahead = AsyncStrategy(max_staleness=2, lead=1)
    tasks = [spec(name="quick", strategy=ahead), spec(name="slow", strategy=ahead)]
    async with Engine(ScriptedController(script), tasks, batch_size=4) as engine:
        await anyio.sleep(60.0)
        batch = await engine.next_batch()
        quick, slow = batch.tasks["quick"], batch.tasks["slow"]
        assert (quick.groups, quick.ready, quick.flight) == (2, 2, 0)
        assert (slow.groups, slow.ready, slow.flight) == (2, 2, 0)
        await anyio.sleep(10.0)  # both refill by two: one is ready again, the other in flight
        batch = await engine.next_batch()
        quick, slow, both = batch.tasks["quick"], batch.tasks["slow"], batch.statistics
        assert (quick.ready, quick.flight) == (2, 0)
        assert (slow.ready, slow.flight) == (0, 2)
        assert (both.ready, both.waiting, both.flight) == (2, 0, 2)


async def test_group_times_of_one_task_and_of_the_union() -> None:
    seconds = {"p0": 0.5, "p1": 1.0, "p2": 3.0}

    def script(attempt: Attempt) -> Reply:
        return Reply([5, 0], delay=seconds[attempt.affinity.split("/")[1]])

    tasks = [
        spec(name="two", prompts=[Prompt("p0", token_ids=[1]), Prompt("p1", token_ids=[1])]),
        spec(name="one", prompts=[Prompt("p2", token_ids=[1])], weight=0.5),
    ]
    async with Engine(ScriptedController(script), tasks) as engine:
        batch = await engine.next_batch(3)
    two, one, union = batch.tasks["two"], batch.tasks["one"], batch.statistics
    assert two.group_seconds_mean == pytest.approx(0.75)
    assert two.group_seconds_p50 == two.group_seconds_p99 == pytest.approx(1.0)
    assert one.group_seconds_mean == one.group_seconds_p50 == pytest.approx(3.0)
    # Of the union, not a weighted mean of the tasks' own.
    assert union.group_seconds_mean == pytest.approx(1.5)
    assert union.group_seconds_p50 == pytest.approx(1.0)
    assert union.group_seconds_p99 == pytest.approx(3.0)


async def test_production_goes_on_while_training_blocks_a_thread() -> None:
    controller = ScriptedController()
    task = spec(strategy=AsyncStrategy(max_staleness=2, lead=1))
    ready, over = threading.Event(), threading.Event()

    class Ready(Instrument):
        def group_ended(self, group: object, outcome: str) -> None:
            if engine.statistics().tasks["task"].ready == 3:  # and this one makes four
                ready.set()

    def train() -> bool:
        """Ends only once the next batches have been made meanwhile."""
        return ready.wait(20.0)

    engine = Engine(controller, task, batch_size=2, instruments=[Ready()])
    async with engine:
        await engine.next_batch()
        ready.clear()
        assert await anyio.to_thread.run_sync(train)
        over.set()
        assert (await engine.next_batch()).statistics.groups == 2


async def test_while_paused_nothing_is_drawn_and_nothing_is_in_flight() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy(max_staleness=4))
    async with Engine(controller, task, batch_size=3) as engine:
        await anyio.sleep(0.35)
        async with engine.paused() as pause:
            assert pause.turns_in_flight > 0
            assert engine.statistics().turns_in_flight == 0
            assert not controller.open
            drawn = engine.statistics().tasks["task"].drawn
            await anyio.sleep(100.0)
            assert engine.statistics().tasks["task"].drawn == drawn
        await anyio.sleep(100.0)
        assert len(await engine.next_batch()) == 3
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.parametrize("strategy", [SyncStrategy(max_staleness=1), AsyncStrategy()])
async def test_the_gate_is_closed_before_the_server_hears_and_opens_after_it_resumed(
    strategy: SyncStrategy | AsyncStrategy,
) -> None:
    controller = ScriptedController(rate=10.0)
    heard: list[tuple[str, list[str]]] = []

    class Order(Instrument):
        def gate_closed(self, in_flight: int) -> None:
            heard.append(("closed", calls()))

        def gate_opened(self, version: int) -> None:
            heard.append(("opened", calls()))

    def calls() -> list[str]:
        return [call[0] for call in controller.log if call[0] in ("abort", "pause", "resume")]

    engine = Engine(controller, spec(strategy=strategy), batch_size=1, instruments=[Order()])
    async with engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.next_batch)
            await anyio.sleep(0.25)
            async with engine.paused():
                pass
    assert heard == [("closed", []), ("opened", ["abort", "pause", "resume"])]


async def test_bad_arguments_change_nothing() -> None:
    controller = ScriptedController()
    async with Engine(controller, spec(), batch_size=2) as engine:
        before = engine.statistics()
        with pytest.raises(ValueError, match="n must be >= 1, got 0"):
            await engine.next_batch(0)
        with pytest.raises(ValueError, match="grace"):
            async with engine.paused(grace=-1.0):
                pass
        with pytest.raises(EngineBusy):
            async with engine.paused() as pause:
                with pytest.raises(ValueError, match="version must rise"):
                    await pause.update_weights({}, version=0)
                async with engine.paused():
                    pass
        after = engine.statistics()
        assert (after.version, after.tasks) == (before.version, before.tasks)
        assert len(await engine.next_batch()) == 2


@pytest.mark.parametrize("make", [SyncStrategy, AsyncStrategy])
async def test_a_negative_bound_is_refused(
    make: type[SyncStrategy] | type[AsyncStrategy],
) -> None:
    with pytest.raises(ValueError, match="max_staleness must be >= 0, got -1"):
        make(max_staleness=-1)


async def test_without_a_tail_batch_what_expired_comes_first_and_more_is_started_on_top() -> None:
    controller = ScriptedController(rate=10.0)
    strategy = AsyncStrategy(max_staleness=0, lead=0, oversample=0.5)
    async with Engine(controller, spec(strategy=strategy), batch_size=4) as engine:
        await anyio.sleep(100.0)
        assert engine.statistics().tasks["task"].ready == 6  # a batch, and half of one on top
        assert len(await engine.next_batch()) == 4
        await anyio.sleep(100.0)
        async with engine.paused() as pause:
            await pause.update_weights({})
        await anyio.sleep(100.0)
        figures = engine.statistics().tasks["task"]
        assert (figures.drawn, figures.expired, figures.redrawn) == (10, 6, 6)  # nothing fresh
        batch = await engine.next_batch()
        assert {sample.lag(batch.version) for sample in batch.samples} == {0}
        await anyio.sleep(100.0)
        figures = engine.statistics().tasks["task"]
        assert (figures.drawn, figures.ready) == (14, 6)
    assert_conserved(engine, committed=controller.committed)


async def test_many_rounds_never_exceed_the_budget() -> None:
    caps: list[int] = []

    def script(attempt: Attempt) -> Reply:
        caps.append(attempt.max_tokens)
        return Reply([7] * 50, delay=float(attempt.max_tokens))

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()

    controller = ScriptedController(script)
    task = spec(loop=loop, group_size=1, strategy=AsyncStrategy(max_staleness=9, lead=0))
    async with Engine(controller, task, batch_size=1) as engine:
        for _ in range(4):
            await anyio.sleep(4.5)
            async with engine.paused() as pause:
                await pause.update_weights({})
        (sample,) = (await engine.next_batch()).samples
    check_sample(sample)
    (turn,) = sample.turns
    assert (turn.attempts, turn.finish_reason, len(turn)) == (5, "length", 20)
    assert caps[:5] == [20, 16, 12, 8, 4]


async def test_a_consumer_waits_through_a_pause_of_another_task() -> None:
    controller = ScriptedController(rate=10.0)
    async with Engine(controller, spec(strategy=SyncStrategy(max_staleness=1))) as engine:
        got: list[int] = []

        async def consume() -> None:
            batch = await engine.next_batch(2)
            got.append(batch.version)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume)
            await checkpoint()
            await anyio.sleep(0.05)
            async with engine.paused() as pause:
                await anyio.sleep(60.0)
                assert got == []
                await pause.update_weights({})
        assert got == [1]
