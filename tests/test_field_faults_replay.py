"""Field faults of resuming, where the group was evicted in between; the numbers are those of the case texts."""

from __future__ import annotations

from typing import Any

import pytest
from anyio import create_task_group, current_time, sleep, sleep_until

from rollnest import (
    Batch,
    Capacity,
    Engine,
    PauseMode,
    Prompt,
    Rollout,
    Sample,
    Sampling,
    Status,
    TaskSpec,
    ToolLoop,
)
from rollnest.abc import Attempt
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    Script,
    ScriptedController,
    assert_conserved,
    check_sample,
)

from .helpers import in_turn
from .toy_tokenizer import EOS, ToyTokenizer

pytestmark = pytest.mark.anyio

PROMPT = Prompt("p", token_ids=[1, 2, 3])


class Caps:
    """Answers in turn, and notes what was asked for."""

    def __init__(self, *replies: Reply) -> None:
        self._script = in_turn(*replies)
        self.asked: list[tuple[list[int], int]] = []

    def __call__(self, attempt: Attempt) -> Reply:
        self.asked.append((attempt.prompt_ids.tolist(), attempt.max_tokens))
        return self._script(attempt)


async def evicted(
    script: Script, *times: float, tokenizer: ToyTokenizer | None = None, **options: Any
) -> tuple[Sample, Engine, RecordingInstrument]:
    """Runs one sample that is evicted at these times."""
    defaults: dict[str, Any] = {"judger": None, "group_size": 1, "starve_after": 1, "epochs": 1}
    capacity = options.pop("capacity", Capacity())
    task = TaskSpec("task", options.pop("prompts", [PROMPT]), **(defaults | options))
    controller, heard = ScriptedController(script), RecordingInstrument()
    got: list[Batch] = []

    async def take(engine: Engine) -> None:
        got.append(await engine.next_batch(1))

    engine = Engine(controller, task, tokenizer=tokenizer, instruments=[heard], capacity=capacity)
    async with engine, create_task_group() as group:
        started = current_time()
        group.start_soon(take, engine)
        for at in times:
            await sleep_until(started + at)
            async with engine.paused(PauseMode.EVICT):
                assert_conserved(engine, committed=controller.committed)
    assert_conserved(engine, committed=controller.committed)
    (sample,) = got[0].samples
    check_sample(sample)
    return sample, engine, heard


async def test_bug_001_ids_are_not_encoded_again_when_the_loop_runs_again() -> None:
    # "ab" is one id to the encoder, and two as it was sampled.
    tokenizer = ToyTokenizer({30: "ab", 10: "a", 11: "b", 40: "R"})
    script = Caps(Reply([10, 11, EOS]), Reply([5, EOS], delay=1.0), Reply([5, EOS]))

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append_messages([{"role": "user", "content": "R"}])
        await rollout.generate()

    sample, _, _ = await evicted(script, 0.2, tokenizer=tokenizer, loop=loop, sampling=Sampling(20))
    before = [1, 2, 3, 10, 11, EOS, 40]
    assert [ids for ids, _ in script.asked[1:]] == [before, before]
    assert 30 not in sample.segments[0].ids.tolist()


async def test_bug_008_a_character_that_was_cut_in_two() -> None:
    tokenizer = ToyTokenizer({80: b"\xc3", 81: b"\xa9"})
    script = Caps(Reply([80, 81, EOS], delay=3.0), Reply([81, EOS]))
    judged: list[str] = []

    async def judge(sample: Sample) -> float:
        judged.append(sample.text)
        return 1.0

    sample, _, _ = await evicted(
        script, 1.5, tokenizer=tokenizer, sampling=Sampling(20), judger=judge
    )
    assert sample.segments[0].ids.tolist() == [80, 81, EOS]
    assert judged == ["é"]


async def test_bug_021_and_023_what_remains_of_the_cap_is_asked_for() -> None:
    script = Caps(Reply([5, 6, 7], delay=3.0), Reply([7], finish="length"))
    sample, _, _ = await evicted(script, 2.5, sampling=Sampling(3))
    assert script.asked == [([1, 2, 3], 3), ([1, 2, 3, 5, 6], 1)]
    assert sample.segments[0].ids.tolist() == [5, 6, 7]
    assert (sample.status, sample.finish_reason) == (Status.COMPLETED, "length")

    ids = list(range(10, 20))
    script = Caps(
        Reply(ids, delay=10.0), Reply(ids[4:], delay=6.0), Reply([*ids[6:8], EOS], delay=1.0)
    )
    sample, _, _ = await evicted(script, 4.5, 7.0, sampling=Sampling(10))
    assert [cap for _, cap in script.asked] == [10, 6, 4]
    assert sample.policy_tokens == 9
    assert sample.turns[0].attempts == 3


async def test_bug_026_and_029_what_was_cut_is_neither_judged_nor_filtered() -> None:
    asked: list[str] = []

    async def judge(sample: Sample) -> float:
        asked.append("judge")
        return 1.0

    def keep(group: Any) -> bool:
        asked.append("keep")
        return True

    script = Caps(Reply([5, 6, EOS], delay=3.0), Reply([6, EOS]))
    sample, _, heard = await evicted(script, 1.5, sampling=Sampling(9), judger=judge, keep=keep)
    (cut, outcome), _ = heard.groups
    assert (outcome, [s.status for s in cut.samples]) == ("waiting", [Status.ABORTED])
    assert cut.samples[0].verdict is None
    assert asked == ["judge", "keep"]
    assert sample.reward == 1.0


async def test_bug_030_a_partial_at_its_cap_is_not_asked_for_again() -> None:
    # The server returns all it was asked for when it is aborted, and calls it aborted.
    script = Caps(Reply([5, 6], finish="abort", delay=1.0))

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.tool(wait)

    async def wait() -> None:
        await sleep(5)

    sample, _, _ = await evicted(script, 1.0, 2.0, sampling=Sampling(2), loop=loop)
    assert len(script.asked) == 1
    assert (sample.segments[0].ids.tolist(), sample.finish_reason) == ([5, 6], "length")


async def test_bug_056_a_tools_result_is_in_the_context_once() -> None:
    tokenizer = ToyTokenizer({40: "R"})
    called: list[str] = []

    async def answer() -> str:
        called.append("answer")
        return "R"

    call = '<tool_call>{"name": "answer", "arguments": {}}</tool_call>'
    asks = [*tokenizer.encode(call), EOS]
    script = Caps(Reply(asks), Reply([5, 6, EOS], delay=3.0), Reply([6, EOS], delay=1.0))
    sample, _, _ = await evicted(
        script, 1.5, 1.7, tokenizer=tokenizer, loop=ToolLoop([answer]), sampling=Sampling(200)
    )
    assert sample.segments[0].ids.tolist() == [*asks, 40, 5, 6, EOS]
    assert called == ["answer"]


async def test_bug_060_one_flag_for_a_sample_that_was_cut() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=2)
        await rollout.generate(max_tokens=9)

    script = Caps(Reply([5, 6], finish="length"), Reply([7, EOS], delay=2.0), Reply([EOS]))
    sample, _, _ = await evicted(script, 1.5, loop=loop, sampling=Sampling(9))
    assert [turn.finish_reason for turn in sample.turns] == ["length", "stop"]
    assert sample.truncated


async def test_bug_096_no_slot_is_lost_by_an_eviction() -> None:
    async def slow() -> None:
        await sleep(1.0)

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        for _ in range(3):
            await rollout.tool(slow)
        await rollout.generate()

    script = Caps(Reply([5, EOS], delay=1.0))
    times = [0.3 * (n + 1) for n in range(12)]
    sample, engine, _ = await evicted(
        script, *times, loop=loop, sampling=Sampling(4), capacity=Capacity(turns=1, tools=1)
    )
    assert len(sample.turns) == 2
    assert engine.statistics().total("redrawn") == len(times)
