"""An engine whose policy gets its first weights from the trainer generates nothing before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from anyio import create_task_group, sleep

from rollnest import AsyncStrategy, Batch, Engine
from rollnest._pause import Pause
from rollnest.errors import EngineBusy, EngineClosed, InferenceError
from rollnest.testing import ScriptedController, assert_conserved

from .helpers import one_name, spec

pytestmark = pytest.mark.anyio

AHEAD = AsyncStrategy(max_staleness=1)


def called(controller: ScriptedController) -> set[str]:
    return {entry[0] for entry in controller.log}


async def update(pause: Pause) -> None:
    await pause.update_weights({})


async def update_later(pause: Pause) -> None:
    await pause.update_weights({}, 7)


async def publish(pause: Pause) -> None:
    pause.published(5)


@pytest.mark.parametrize(
    ("first", "version"), [(update, 5), (update_later, 7), (publish, 5)], ids=one_name
)
async def test_bug_073_the_first_weights_open_the_gate(
    first: Callable[[Pause], Awaitable[None]], version: int
) -> None:
    controller = ScriptedController()
    task = spec(strategy=AHEAD)
    async with Engine(controller, task, batch_size=1, version=5, start_paused=True) as engine:
        await sleep(100)
        assert called(controller) == {"enter"}
        assert engine.statistics().total("drawn") == 0
        async with engine.paused() as pause:
            await first(pause)
        assert engine.version == version
        batch = await engine.next_batch()
        assert {s.oldest_version for s in batch.samples} == {version}
        async with engine.paused() as pause:
            await pause.update_weights({})  # from now on they rise
            with pytest.raises(ValueError, match="rise"):
                await pause.update_weights({}, version + 1)
    assert engine.version == version + 1
    assert_conserved(engine, committed=controller.committed)


async def test_a_pause_without_weights_leaves_it_closed() -> None:
    controller = ScriptedController()
    async with Engine(
        controller, spec(strategy=AHEAD), batch_size=1, version=5, start_paused=True
    ) as engine:
        async with engine.paused() as pause:
            with pytest.raises(ValueError, match="waits for"):
                await pause.update_weights({}, 4)
        with pytest.raises(ZeroDivisionError):
            async with engine.paused():
                raise ZeroDivisionError
        await sleep(10)
        assert "generate" not in called(controller)
        async with engine.paused() as pause:
            await pause.update_weights({}, 5)
        await engine.next_batch()


async def test_the_server_that_has_them_opens_the_gate_at_entry() -> None:
    controller = ScriptedController(version=5)
    async with Engine(controller, spec(), version=5, start_paused=True) as engine:
        batch = await engine.next_batch(1)
        assert batch.version == 5


async def test_a_server_that_never_got_any_opens_nothing() -> None:
    controller = ScriptedController()
    async with Engine(controller, spec(), start_paused=True) as engine:
        with pytest.raises(EngineBusy, match=r"waits for weights of version 0.*reports version 0"):
            await engine.next_batch(1)
        async with engine.paused() as pause:
            await pause.update_weights({})
        assert engine.version == 0
        await engine.next_batch(1)


async def test_the_server_may_get_them_from_elsewhere() -> None:
    controller = ScriptedController()
    got: list[Batch] = []

    async def consume(engine: Engine) -> None:
        got.append(await engine.next_batch(1, wait_in_pause=True))

    async with (
        Engine(controller, spec(), version=5, start_paused=True) as engine,
        create_task_group() as group,
    ):
        with pytest.raises(EngineBusy):
            await engine.next_batch(1)
        group.start_soon(consume, engine)
        await sleep(20)
        assert not got
        controller._version = 5  # a trainer's own connection
        await sleep(30)
        assert got
    assert got[0].version == 5


async def test_waiting_is_bounded_and_says_what_is_missing() -> None:
    async with Engine(
        ScriptedController(version=3), spec(), version=5, start_paused=True, outage=50.0
    ) as engine:
        before = anyio.current_time()
        with pytest.raises(EngineBusy, match=r"weights of version 5.*reports version 3") as caught:
            await engine.next_batch(2, wait_in_pause=True)
        assert anyio.current_time() - before == pytest.approx(50.0)
        assert (caught.value.ready, caught.value.asked) == (0, 2)


async def test_a_server_that_is_not_up_yet_is_asked_again() -> None:
    class Late(ScriptedController):
        asked = 0

        async def version(self) -> int | None:
            self.asked += 1
            if 1 < self.asked < 4:
                raise InferenceError("503: loading", retryable=True)
            return None if self.asked == 1 else 5

    controller = Late(version=5)
    async with Engine(controller, spec(), version=5, start_paused=True) as engine:
        with pytest.raises(EngineBusy, match="503: loading"):
            await engine.next_batch(1)
        await engine.next_batch(1, wait_in_pause=True)


async def test_a_waiting_consumer_hears_of_the_pause_and_of_the_end() -> None:
    got: list[Any] = []

    async def consume(engine: Engine) -> None:
        try:
            got.append(await engine.next_batch(1, wait_in_pause=True))
        except EngineClosed as error:
            got.append(error)

    async with create_task_group() as group:
        async with Engine(ScriptedController(), spec(), start_paused=True) as engine:
            group.start_soon(consume, engine)
            await sleep(1)
            before = anyio.current_time()
            async with engine.paused() as pause:
                await pause.update_weights({})
            await sleep(0.001)
            assert isinstance(got[0], Batch)
            assert anyio.current_time() == before + 0.001
        async with Engine(ScriptedController(), spec(), start_paused=True) as engine:
            group.start_soon(consume, engine)
            await sleep(1)
    assert isinstance(got[1], EngineClosed)


async def test_time_before_the_first_weights_is_pause_time() -> None:
    async with Engine(ScriptedController(), spec(), start_paused=True) as engine:
        await sleep(30)
        async with engine.paused() as pause:
            await pause.update_weights({})
        assert engine.statistics().pause_seconds == pytest.approx(30)


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_start_paused_is_a_bool(value: Any) -> None:
    with pytest.raises(TypeError, match="start_paused"):
        Engine(ScriptedController(), spec(), start_paused=value)
