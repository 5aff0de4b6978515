"""Field faults of rewards and judgers; the numbers are those of the case texts."""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np
import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint

from rollnest import Engine, Rollout, Sample, Status
from rollnest.errors import Starved
from rollnest.testing import RecordingInstrument, Reply, ScriptedController

from .helpers import in_turn, one_batch, spec
from .toy_tokenizer import EOS, ToyTokenizer

pytestmark = pytest.mark.anyio


async def test_bug_044_a_plain_function_does_not_stall_the_loop() -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    def judge(sample: Sample) -> float:
        begun.release()
        assert release.wait(20), "the loop stood still"
        return 1.0

    async with (
        Engine(ScriptedController(), spec(judger=judge, group_size=8)) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        for _ in range(8):  # all eight are blocked, and the loop still turns
            while not begun.acquire(blocking=False):
                await checkpoint()
        release.set()
    assert engine.statistics().total("delivered") == 1


async def test_bug_045_a_scorer_that_needs_the_main_thread_fails_and_scores_nothing() -> None:
    def judge(sample: Sample) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0

    recording = RecordingInstrument()
    task = spec(judger=judge, group_size=1, starve_after=1)
    async with Engine(ScriptedController(), task, instruments=[recording]) as engine:
        with pytest.raises(Starved, match="main thread"):
            await engine.next_batch(1)
    (sample,) = recording.samples
    assert (sample.status, sample.reward) == (Status.FAILED, None)
    assert sample.failure is not None
    assert sample.failure.kind == "judge"


async def test_bug_046_rewards_are_checked_where_they_enter() -> None:
    answers: list[Any] = [1, None, {"score": 0.5}, np.float32(0)]

    async def judge(sample: Sample) -> Any:
        return answers[sample.visit]

    recording = RecordingInstrument()
    task = spec(judger=judge, group_size=1, shuffle=False)
    async with Engine(ScriptedController(), task, instruments=[recording]) as engine:
        await engine.next_batch(1)
        await engine.next_batch(1)
        batch = await engine.next_batch(1)
    rewards = {s.visit: s.reward for s in recording.samples}
    assert rewards == {0: 1.0, 1: None, 2: 0.5, 3: 0.0}
    assert all(type(r) is float for r in rewards.values() if r is not None)
    assert batch.statistics.reward_mean == 0.0
    assert engine.statistics().tasks["task"].dropped == {"judge": 1}


async def test_bug_048_the_judger_sees_what_the_policy_wrote() -> None:
    seen: list[str] = []

    async def judge(sample: Sample) -> float:
        seen.append(sample.text)
        return 1.0

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append_messages([{"role": "tool", "content": "ANSWER 42"}])
        await rollout.generate()

    tokenizer = ToyTokenizer({5: "try", 6: "done"})
    controller = ScriptedController(in_turn(Reply([5, EOS]), Reply([6, EOS])))
    task = spec(prompts=["q"], judger=judge, loop=loop, group_size=1)
    await one_batch(controller, task, tokenizer=tokenizer)
    assert seen == ["trydone"]


async def test_bug_051_a_lost_sandbox_is_no_wrong_answer() -> None:
    judged: list[tuple[str, int]] = []

    def sandbox() -> None:
        raise ConnectionError("sandbox lost")

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if (rollout.prompt.uid, rollout.index) == ("p0", 1):
            await rollout.tool(sandbox)

    async def judge(sample: Sample) -> float:
        judged.append((sample.prompt.uid, sample.index))
        return float(sample.index == 0)

    task = spec(loop=loop, judger=judge, group_size=3, shuffle=False)
    batch, engine = await one_batch(ScriptedController(), task)
    assert batch.groups[0].prompt.uid == "p1"
    assert batch.groups[0].rewards == (1.0, 0.0, 0.0)
    assert ("p0", 1) not in judged
    assert engine.statistics().tasks["task"].dropped == {"tool": 1}


async def test_bug_052_a_batch_says_that_it_teaches_nothing() -> None:
    async def judge(sample: Sample) -> float:
        return 0.0

    batch, _ = await one_batch(ScriptedController(), spec(judger=judge), 8)
    figures = batch.statistics
    assert (figures.zero_variance_share, figures.reward_min, figures.reward_max) == (1.0, 0.0, 0.0)
