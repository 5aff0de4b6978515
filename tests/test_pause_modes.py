"""What each pause mode does to the turns in flight."""

from __future__ import annotations

import anyio
import pytest
from anyio import create_task_group

from rollnest import Batch, Engine, PauseMode, Sampling, SyncStrategy
from rollnest.errors import EngineBroken, PauseFailed, WeightsState, WeightUpdateFailed
from rollnest.testing import Reply, ScriptedController, assert_conserved

from .helpers import in_turn, spec

pytestmark = pytest.mark.anyio


async def take(got: list[Batch], engine: Engine, n: int) -> None:
    got.append(await engine.next_batch(n))


async def test_wait_lets_the_turns_end() -> None:
    controller = ScriptedController(rate=10.0, stop_every=10_000)
    got: list[Batch] = []
    async with Engine(controller, spec()) as engine, create_task_group() as group:
        group.start_soon(take, got, engine, 1)
        await anyio.sleep(0.5)
        async with engine.paused(PauseMode.WAIT) as pause:
            assert pause.turns_in_flight == 2
            assert 1.4 <= pause.quiet_seconds <= 1.6  # 20 tokens take 2 s
            assert not [entry for entry in controller.log if entry[0] == "abort"]
            assert controller.while_paused == 0
    assert [turn.attempts for s in got[0].samples for turn in s.turns] == [1, 1]
    assert engine.statistics().total("resumed_turns") == 0
    assert_conserved(engine, committed=controller.committed)


async def test_wait_aborts_what_has_not_ended_after_grace() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    task = spec(strategy=SyncStrategy(max_staleness=1))
    got: list[Batch] = []
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(take, got, engine, 1)
        await anyio.sleep(2.5)
        async with engine.paused(PauseMode.WAIT, grace=3.0) as pause:
            assert 3.0 <= pause.quiet_seconds <= 3.01
            await pause.update_weights({})
    for sample in got[0].samples:
        assert sample.segments[0].response.version_runs == ((0, 0, 5), (1, 5, 20))
    assert_conserved(engine, committed=controller.committed)


async def test_wait_is_bounded_by_grace_and_control_timeout() -> None:
    deaf = ScriptedController(in_turn(Reply(range(1, 101), delay=1000.0, deaf=-1)))
    task = spec(group_size=1, sampling=Sampling(100))
    async with (
        Engine(deaf, task, control_timeout=4.0) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await anyio.sleep(1)
        async with engine.paused(PauseMode.WAIT, grace=3.0) as pause:
            assert 5.0 <= pause.quiet_seconds <= 5.05  # grace, then half a control timeout
        group.cancel_scope.cancel()
    assert_conserved(engine, committed=deaf.committed)


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_an_unconfirmed_pause_fails_within_grace_and_control_timeout(
    mode: PauseMode,
) -> None:
    controller = ScriptedController(
        in_turn(Reply(range(1, 101), delay=1000.0, deaf=-1)), pause_hangs=True
    )
    task = spec(group_size=1, sampling=Sampling(100))
    async with (
        Engine(controller, task, control_timeout=4.0) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await anyio.sleep(1)
        before = anyio.current_time()
        with pytest.raises(PauseFailed):
            async with engine.paused(mode, grace=3.0):
                pytest.fail("entered")
        assert anyio.current_time() - before <= 7.0 + 1e-6
        await anyio.sleep(1)
        assert len(controller.open) == 1  # production goes on
        group.cancel_scope.cancel()


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_pause_with_nothing_in_flight_takes_no_time(mode: PauseMode) -> None:
    async with Engine(ScriptedController(), spec()) as engine:
        async with engine.paused(mode) as pause:
            assert pause.quiet_seconds == 0
            assert pause.turns_in_flight == 0


async def test_a_published_version_reaches_the_server_before_it_resumes() -> None:
    controller = ScriptedController()
    async with Engine(controller, spec(strategy=SyncStrategy(max_staleness=1))) as engine:
        async with engine.paused() as pause:
            pause.published(3)
            assert engine.version == 3
        calls = [entry[0] for entry in controller.log if entry[0] != "enter"]
        assert calls == ["pause", "update_weights", "resume"]
        assert await controller.version() == 3
        batch = await engine.next_batch(1)
    assert {s.oldest_version for s in batch.samples} == {3}


async def test_an_update_after_a_published_version_replaces_it() -> None:
    controller = ScriptedController()
    async with Engine(controller, spec()) as engine:
        async with engine.paused() as pause:
            pause.published(3)
            await pause.update_weights({}, 4)
        assert await controller.version() == engine.version == 4
        assert [e[1] for e in controller.log if e[0] == "update_weights"] == [4]


async def test_a_server_that_does_not_take_a_published_version_breaks_the_engine() -> None:
    controller = ScriptedController(update_error=RuntimeError("label refused"))
    async with Engine(controller, spec()) as engine:
        with pytest.raises(EngineBroken, match="label refused"):
            async with engine.paused() as pause:
                pause.published(3)
        with pytest.raises(EngineBroken):
            await engine.next_batch(1)


async def test_an_update_that_failed_with_new_weights_comes_after_what_was_published_before() -> (
    None
):
    controller = ScriptedController()
    async with Engine(controller, spec()) as engine:
        async with engine.paused() as pause:
            pause.published(1)
            controller.update_error = WeightUpdateFailed("they are in", weights=WeightsState.NEW)
            with pytest.raises(WeightUpdateFailed):
                await pause.update_weights({})
            controller.update_error = None
        assert engine.version == 2
        assert await controller.version() == 2
