"""Field faults of partial rollout, pausing and cancellation; the numbers are those of the case texts."""

from __future__ import annotations

import math

import anyio
import pytest
from anyio import create_task_group, sleep

from rollnest import AsyncStrategy, Engine, Prompt, Rollout, Sample, Sampling, Status
from rollnest.abc import Attempt
from rollnest.errors import InferenceError
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
    check_sample,
)

from .helpers import in_turn, one_batch, prompts, spec

pytestmark = pytest.mark.anyio


def noting_caps(caps: list[int], *replies: Reply) -> ScriptedController:
    script = in_turn(*replies)

    def note(attempt: Attempt) -> Reply:
        caps.append(attempt.max_tokens)
        return script(attempt)

    return ScriptedController(note)


async def test_bug_021_what_remains_is_asked_for_after_a_pause() -> None:
    caps: list[int] = []
    controller = noting_caps(caps, Reply([5, 6, 7], delay=3.0), Reply([7], finish="length"))
    recording = RecordingInstrument()
    task = spec(prompts=[Prompt("p", token_ids=[1, 2, 3])], group_size=1, sampling=Sampling(3))
    async with (
        Engine(controller, task, instruments=[recording]) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await sleep(2.5)
        async with engine.paused():
            pass
    assert controller.prompts == [[1, 2, 3], [1, 2, 3, 5, 6]]
    assert caps == [3, 1]
    sample = recording.samples[0]
    check_sample(sample)
    assert (sample.status, sample.finish_reason) == (Status.COMPLETED, "length")
    assert sample.segments[0].ids.tolist() == [5, 6, 7]
    assert sample.segments[0].mask.tolist() == [1, 1, 1]


async def test_bug_022_a_failed_try_leaves_no_token_behind() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        with pytest.raises(InferenceError, match="logprobs"):
            await rollout.generate()
        assert rollout.response.ids.tolist() == [5]
        await rollout.generate()

    caps: list[int] = []
    controller = noting_caps(caps, Reply([5]), Reply([6], logprobs=[math.nan]), Reply([6, 9]))
    task = spec(prompts=[Prompt("p", token_ids=[1])], loop=loop, group_size=1)
    batch, engine = await one_batch(controller, task)
    assert controller.prompts == [[1], [1, 5], [1, 5]]
    assert caps == [20, 20, 20]
    assert next(batch.samples).segments[0].ids.tolist() == [5, 6, 9]
    assert engine.statistics().total("tokens_rejected") == 1
    assert_conserved(engine, committed=controller.committed)


async def test_bug_023_caps_are_derived_and_never_written_back() -> None:
    caps: list[int] = []
    controller = noting_caps(
        caps,
        Reply([*range(10, 20)], delay=10.0),
        Reply([*range(20, 26)], delay=6.0),
        Reply([5, 6, 0]),
    )
    task = spec(group_size=1, sampling=Sampling(10))
    recording = RecordingInstrument()
    async with (
        Engine(controller, task, instruments=[recording]) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        for seconds in (4.5, 2.5):
            await sleep(seconds)
            async with engine.paused():
                pass
    assert caps == [10, 6, 4]
    sample = recording.samples[0]
    assert sample.policy_tokens == 9
    assert sample.sampling is not None
    assert sample.sampling.max_tokens == 10
    assert sample.turns[0].attempts == 3


async def test_bug_026_a_group_that_was_only_cut_is_not_lost() -> None:
    def script(attempt: Attempt) -> Reply:
        return Reply([5, 0], delay=0.0 if attempt.max_tokens == 2 else 100.0)

    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=2 + rollout.index)

    recording = RecordingInstrument()
    controller = ScriptedController(script)
    task = spec(loop=loop, strategy=AsyncStrategy(lead=0))
    async with Engine(controller, task, batch_size=1, instruments=[recording]) as engine:
        await sleep(1)
    ((group, outcome),) = recording.groups
    assert [s.status for s in group.samples] == [Status.COMPLETED, Status.ABORTED]
    assert outcome == "waiting"
    figures = engine.statistics().tasks["task"]
    assert (figures.waiting, figures.dropped, figures.delivered) == (1, {}, 0)


async def test_bug_027_a_segment_that_was_cut_cuts_its_sample() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.segment([7]).generate()

    def script(attempt: Attempt) -> Reply:
        return Reply([5, 0], delay=100.0 if attempt.prompt_ids[0] == 7 else 0.0)

    recording = RecordingInstrument()
    task = spec(loop=loop, group_size=1, strategy=AsyncStrategy(lead=0))
    async with Engine(
        ScriptedController(script), task, batch_size=1, instruments=[recording]
    ) as engine:
        await sleep(1)
    ((group, outcome),) = recording.groups
    assert (group.status, outcome) == (Status.ABORTED, "waiting")
    assert engine.statistics().total("ready") == 0


async def test_bug_028_a_batch_does_not_wait_for_a_surplus_judge() -> None:
    judging: set[str] = set()

    async def judge(sample: Sample) -> float:
        judging.add(sample.prompt.uid)
        try:
            await sleep(60 if sample.prompt.uid == "p2" else 0.1)
        finally:
            judging.discard(sample.prompt.uid)
        return 1.0

    task = spec(
        judger=judge,
        group_size=1,
        shuffle=False,
        prompts=prompts(3),
        strategy=AsyncStrategy(lead=0.5),
    )
    async with Engine(ScriptedController(), task, batch_size=2) as engine:
        before = anyio.current_time()
        batch = await engine.next_batch()
        assert anyio.current_time() - before < 1
        assert len(batch) == 2
        assert judging == {"p2"}
        async with engine.paused() as pause:
            assert pause.quiet_seconds < 1
    assert anyio.current_time() - before < 1
    assert not judging


async def test_bug_029_what_was_cut_is_never_judged() -> None:
    judged: list[list[int]] = []

    async def judge(sample: Sample) -> float:
        judged.append(sample.segments[0].ids.tolist())
        return 1.0

    controller = ScriptedController(
        in_turn(Reply([5, 6, 7, 0], delay=4.0), Reply([7, 0], delay=4.0))
    )
    task = spec(judger=judge, group_size=1)
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(2.5)
        async with engine.paused():
            await sleep(10)
            assert judged == []
    assert judged == [[5, 6, 7, 0]]


async def test_bug_030_a_partial_at_its_cap_is_not_sent_again() -> None:
    controller = ScriptedController(in_turn(Reply([5, 6], finish="abort")))
    batch, _ = await one_batch(controller, spec(group_size=1, sampling=Sampling(2)))
    (sample,) = batch.samples
    assert len(controller.prompts) == 1
    assert (sample.status, sample.finish_reason) == (Status.COMPLETED, "length")
    assert sample.segments[0].ids.tolist() == [5, 6]


async def test_bug_095_every_sample_that_began_ends_in_one_state() -> None:
    async def loop(rollout: Rollout) -> None:
        try:
            await rollout.generate(max_tokens=2 + (rollout.index == 1))
        except Exception:  # a cancellation is none
            rollout.fail("never seen")

    def script(attempt: Attempt) -> Reply:
        return Reply([5, 0], delay=1.0 if attempt.max_tokens == 2 else 100.0)

    recording = RecordingInstrument()
    task = spec(loop=loop, group_size=3, strategy=AsyncStrategy(lead=0))
    async with Engine(
        ScriptedController(script), task, batch_size=1, instruments=[recording]
    ) as engine:
        await sleep(5)
    ((group, _),) = recording.groups
    expected = [Status.COMPLETED, Status.ABORTED, Status.COMPLETED]
    assert [s.status for s in group.samples] == expected
    assert_conserved(engine)


async def test_bug_097_a_consumer_may_leave_early() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy())
    async with Engine(controller, task, batch_size=2) as engine:
        async for batch in engine.batches():
            assert len(batch) == 2
            break
        assert len(await engine.next_batch()) == 2
    assert not controller.open
    assert_conserved(engine, committed=controller.committed)
