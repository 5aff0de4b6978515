"""Faults of the field in judgers that run in processes, and in what a hanging run tells."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from anyio import create_task_group, current_time
from anyio.lowlevel import checkpoint

from rollnest import Engine, Limits, ProcessJudger, Prompt, Status
from rollnest.testing import RecordingInstrument, ScriptedController, assert_conserved

from . import judgers_in_processes as judgers
from .helpers import one_batch, prompts, spec
from .test_processes import is_alive, until

pytestmark = pytest.mark.anyio


async def test_bug_045_a_scorer_with_a_signal_timer_works_in_a_process() -> None:
    task = spec(judger=ProcessJudger(judgers.with_signal_timer, workers=1))
    batch, _ = await one_batch(ScriptedController(), task)
    assert batch.groups[0].rewards == (0.5, 0.5)


@pytest.mark.parametrize("workers", [None, 1, 3])
async def test_bug_049_hooks_of_a_judger_are_its_own_in_a_pool_too(workers: int | None) -> None:
    judger: Any = judgers.WithHooks(2.0)
    if workers is not None:
        judger = ProcessJudger(judger, workers=workers)
    batch, _ = await one_batch(ScriptedController(), spec(judger=judger), 3)
    assert [group.rewards for group in batch.groups] == [(1.0, 1.0)] * 3


async def test_bug_053_the_loop_runs_on_while_judgers_are_closed(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    asked = [Prompt("slow", token_ids=[1, 2], label=str(told))]
    controller = ScriptedController()
    task = spec(
        judger=ProcessJudger(judgers.block), prompts=asked, group_size=1, limits=Limits(judge=None)
    )
    beats: list[float] = []

    async def beat() -> None:
        while True:
            beats.append(current_time())
            await checkpoint()

    async with create_task_group() as outside:
        async with Engine(controller, task) as engine, create_task_group() as group:
            group.start_soon(engine.next_batch, 1)
            await until(told.exists)
            group.cancel_scope.cancel()
            outside.start_soon(beat)
            before = current_time()
        assert current_time() == before  # nobody waits for what blocks
        assert beats
        outside.cancel_scope.cancel()
    pids = [int(pid) for pid in told.read_text().split()]
    await until(lambda: not any(map(is_alive, pids)))
    assert_conserved(engine, committed=controller.committed)


async def test_bug_061_what_a_judger_has_started_ends_with_it(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    asked = [Prompt("slow", token_ids=[1, 2], label=str(told))]
    task = spec(
        judger=ProcessJudger(judgers.block), prompts=asked, group_size=1, limits=Limits(judge=None)
    )
    async with (
        Engine(ScriptedController(), task) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await until(told.exists)
        worker, child = (int(pid) for pid in told.read_text().split())
        assert is_alive(worker)
        assert is_alive(child)
        group.cancel_scope.cancel()
    await until(lambda: not is_alive(worker) and not is_alive(child))


async def test_bug_089_a_dead_worker_fails_what_it_had_and_gets_nothing_more() -> None:
    recording = RecordingInstrument()
    task = spec(
        judger=ProcessJudger(judgers.Dying(), workers=1),
        prompts=prompts(5),
        group_size=1,
        epochs=1,
    )
    async with Engine(ScriptedController(), task, instruments=[recording]) as engine:
        batch = await engine.next_batch(5)
        assert engine.tree().slots["judge"].used == 0
    assert batch.short
    (failed,) = [s for s in recording.samples if s.status is Status.FAILED]
    assert failed.failure is not None
    assert "ended with exit code 3" in failed.failure.message
    pids = [s.verdict.details["pid"] for g in batch.groups for s in g.samples if s.verdict]
    assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2]  # two before it died, two anew
    assert os.getpid() not in pids
