"""The stall report: said once, with who waits for what, and only if nothing at all ends."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from anyio import create_task_group, sleep, sleep_forever
from anyio.lowlevel import checkpoint

from rollnest import AsyncStrategy, Engine, Limits, PauseMode, Rollout, Sample, Sampling
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    free_running_threads,
)

from .helpers import in_turn, spec

pytestmark = pytest.mark.anyio


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("nothing has finished")
    ]


async def test_a_server_that_never_answers(caplog: pytest.LogCaptureFixture) -> None:
    recording = RecordingInstrument()
    controller = ScriptedController(in_turn(Reply([5, 0], delay=100_000.0)))
    async with (
        Engine(controller, spec(), stall_after=60.0, instruments=[recording]) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await sleep(59)
        assert not told(caplog)
        await sleep(2)
        (message,) = told(caplog)
        assert message.startswith("nothing has finished for 60 s\n")
        assert "next_batch(1) waits, 60.0 s: lacks 1 of 'task'" in message
        assert "/0 waits for the server (0 of 20 tokens" in message
        assert "print(engine.tree()) shows everything" in message
        assert caplog.records[0].levelno == logging.WARNING
        ((report,),) = recording.named("stalled")
        assert report.seconds == 60.0  # type: ignore[attr-defined]
        await sleep(1000)
        assert len(told(caplog)) == 1  # once
        group.cancel_scope.cancel()


async def test_once_something_ends_the_next_stall_is_told_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = in_turn(Reply([5, 0], delay=100.0), Reply([5, 0], delay=100_000.0))

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.generate()

    task = spec(loop=loop, group_size=1, judger=None)
    async with (
        Engine(ScriptedController(script), task, stall_after=60.0) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await sleep(99)
        assert len(told(caplog)) == 1
        await sleep(50)  # the first turn has ended after 100 s, without any group
        assert len(told(caplog)) == 1
        await sleep(12)
        assert len(told(caplog)) == 2
        group.cancel_scope.cancel()


async def test_whatever_ends_moves_it_on(caplog: pytest.LogCaptureFixture) -> None:
    async def judge(sample: Sample) -> float:
        await sleep(50)
        return 1.0

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.tool(sleep, 50)

    script = in_turn(Reply([5, 0], delay=50.0))
    task = spec(loop=loop, judger=judge)
    async with Engine(ScriptedController(script), task, stall_after=60.0) as engine:
        for _ in range(3):
            await engine.next_batch(1)
    assert not told(caplog)


async def test_an_answer_that_grows_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    controller = ScriptedController(rate=0.1, stop_every=10**9, stream=True)
    task = spec(sampling=Sampling(40))
    async with Engine(controller, task, stall_after=60.0) as engine:
        await engine.next_batch(1)  # 400 s
    assert not told(caplog)


async def test_time_with_the_gate_closed_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    controller = ScriptedController(in_turn(Reply([5, 0], delay=100_000.0)))
    async with (
        Engine(controller, spec(), stall_after=60.0) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await sleep(40)
        async with engine.paused(PauseMode.ABORT):
            await sleep(500)
        assert not told(caplog)
        await sleep(19)
        assert not told(caplog)
        await sleep(100)
        assert len(told(caplog)) == 1
        group.cancel_scope.cancel()


async def test_time_in_which_nobody_waits_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    controller = ScriptedController(in_turn(Reply([5, 0], delay=500.0)))
    task = spec(strategy=AsyncStrategy())
    async with Engine(controller, task, batch_size=1, stall_after=60.0) as engine:
        await sleep(450)
        await engine.next_batch()
        assert not told(caplog)


async def test_none_never_tells(caplog: pytest.LogCaptureFixture) -> None:
    controller = ScriptedController(in_turn(Reply([5, 0], delay=100_000.0)))
    async with Engine(controller, spec(), stall_after=None) as engine:
        await engine.next_batch(1)
    assert not told(caplog)


async def test_an_abandoned_thread_is_named(caplog: pytest.LogCaptureFixture) -> None:
    begun, release = threading.Event(), threading.Event()

    def judge(sample: Sample) -> float:
        begun.set()
        assert release.wait(20)
        return 1.0

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.prompt.uid != "p0":
            await sleep_forever()

    task = spec(judger=judge, loop=loop, group_size=1, shuffle=False, limits=Limits(judge=5.0))
    with free_running_threads():
        async with (
            Engine(ScriptedController(), task, stall_after=60.0) as engine,
            create_task_group() as group,
        ):
            group.start_soon(engine.next_batch, 1)
            while not begun.is_set():
                await checkpoint()
            await sleep(100)
            (message,) = told(caplog)
            assert "judge slots: judger of task/p0/0/0: abandoned, its thread still runs" in message
            assert "task/p1/1/0 waits for its agent loop" in message
            release.set()
            while engine.statistics().abandoned_threads:
                await checkpoint()
            group.cancel_scope.cancel()


@pytest.mark.parametrize("value", [0, -1, float("nan"), "300", True])
def test_bad_values(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="stall_after must be"):
        Engine(ScriptedController(), spec(), stall_after=value)
