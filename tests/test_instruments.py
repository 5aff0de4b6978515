"""Instruments hear everything that happens, once, and cost nothing where nobody listens."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
from anyio import create_task_group, sleep
from anyio.lowlevel import checkpoint

from rollnest import AsyncStrategy, Engine, Limits, Rollout, Sample, SyncStrategy
from rollnest.abc import Instrument
from rollnest.errors import EngineBroken, PauseFailed
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    free_running_threads,
)

from .helpers import in_turn, score_one, spec

pytestmark = pytest.mark.anyio

HOOKS = [name for name in vars(Instrument) if not name.startswith("_")]


def test_the_recording_instrument_records_everything() -> None:
    for hook in HOOKS:
        assert hook in vars(RecordingInstrument), hook
        theirs = inspect.signature(getattr(RecordingInstrument, hook))
        assert theirs == inspect.signature(getattr(Instrument, hook)), hook


@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
async def test_tools_and_judgers(sync: bool) -> None:
    async def search(query: str) -> str:
        await sleep(2)
        return query

    def search_in_thread(query: str) -> str:
        return query

    async def judge(sample: Sample) -> float:
        await sleep(3)
        return 1.0

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.tool(search_in_thread if sync else search, "x")

    recording = RecordingInstrument()
    task = spec(judger=score_one if sync else judge, loop=loop, group_size=1, shuffle=False)
    async with Engine(ScriptedController(), task, instruments=[recording]) as engine:
        await engine.next_batch(1)
    tool = "search_in_thread" if sync else "search"
    ((key, name, again),) = recording.named("tool_started")
    assert (str(key).startswith("task/p0/0/0/"), name, again) == (True, tool, False)
    assert recording.named("tool_ended") == [(key, name, again)]
    assert recording.named("judge_started") == [("judger of task/p0/0/0",)]
    assert recording.named("judge_ended") == [("judger of task/p0/0/0", 0.0 if sync else 3.0)]


async def test_a_lost_slot_and_its_end() -> None:
    begun, release = threading.Event(), threading.Event()

    def judge(sample: Sample) -> float:
        if sample.visit == 0:
            begun.set()
            assert release.wait(20)
        return 1.0

    recording = RecordingInstrument()
    task = spec(judger=judge, group_size=1, shuffle=False, limits=Limits(judge=5.0))
    async with (
        Engine(ScriptedController(), task, instruments=[recording]) as engine,
        create_task_group() as group,
    ):
        with free_running_threads():
            group.start_soon(engine.next_batch, 1)
            while not begun.is_set():
                await checkpoint()
            await sleep(6)
        assert recording.named("slot_lost") == [("judger of task/p0/0/0",)]
        ended = [name for name, _ in recording.named("judge_ended")]
        assert "judger of task/p0/0/0" not in ended
        release.set()
        while engine.statistics().abandoned_threads:
            await checkpoint()
        ended = [name for name, _ in recording.named("judge_ended")]
        assert ended.count("judger of task/p0/0/0") == 1


async def test_weights_and_what_they_make_too_old() -> None:
    recording = RecordingInstrument()
    task = spec(strategy=AsyncStrategy(max_staleness=0, lead=0))
    controller = ScriptedController()
    async with Engine(controller, task, batch_size=2, instruments=[recording]) as engine:
        while engine.statistics().total("ready") < 2:
            await checkpoint()
        async with engine.paused() as pause:
            await pause.update_weights({})
        async with engine.paused() as pause:
            pause.published(5)
        await engine.next_batch()
    assert recording.named("weights_updated") == [(1,), (5,)]
    assert recording.named("groups_expired") == [("task", 2)]
    closed, opened = recording.named("gate_closed"), recording.named("gate_opened")
    assert len(closed) == len(opened) == 2
    assert [version for (version,) in opened] == [1, 5]


async def test_a_failed_pause() -> None:
    recording = RecordingInstrument()
    controller = ScriptedController(pause_hangs=True)
    task = spec(strategy=SyncStrategy())
    async with Engine(controller, task, control_timeout=4.0, instruments=[recording]) as engine:
        with pytest.raises(PauseFailed) as caught:
            async with engine.paused():
                pass
        await engine.next_batch(1)
    assert recording.named("pause_failed") == [(caught.value,)]
    assert not recording.named("paused")
    assert len(recording.named("gate_opened")) == 1


async def test_a_broken_engine() -> None:
    recording = RecordingInstrument()
    error = RuntimeError("out of memory")
    controller = ScriptedController(update_error=error)
    async with Engine(controller, spec(), instruments=[recording]) as engine:
        with pytest.raises(RuntimeError, match="out of memory"):
            async with engine.paused() as pause:
                await pause.update_weights({})
        with pytest.raises(EngineBroken):
            await engine.next_batch(1)
    ((why, cause),) = recording.named("engine_broken")
    assert cause is error
    assert str(why).startswith("nobody knows which weights the policy holds")
    assert not recording.named("weights_updated")


async def test_one_that_raises_is_taken_out_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Bad(Instrument):
        calls = 0

        def judge_started(self, name: str) -> None:
            self.calls += 1
            raise RuntimeError("no disk")

        def judge_ended(self, name: str, seconds: float) -> None:
            self.calls += 1

    bad, recording = Bad(), RecordingInstrument()
    async with Engine(ScriptedController(), spec(), instruments=[bad, recording]) as engine:
        await engine.next_batch(2)
    assert bad.calls == 1
    assert len(recording.named("judge_ended")) == 4
    assert "raised in judge_started and is taken out" in caplog.text


async def test_no_name_is_made_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sample: Any) -> str:
        raise AssertionError("a name was made")

    monkeypatch.setattr(Sample, "uid", property(refuse))
    async with Engine(ScriptedController(in_turn(Reply([5, 0]))), spec()) as engine:
        await engine.next_batch(2)
