"""Field faults of agent loops and tools; the numbers are those of the case texts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from anyio import create_task_group, current_time, move_on_after, sleep_forever
from anyio.lowlevel import checkpoint

from rollnest import Engine, Limits, Prompt, Rollout, Sampling, Status, ToolLoop
from rollnest.abc import Attempt
from rollnest.errors import Starved, ToolError
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    check_sample,
    free_running_threads,
)

from .helpers import in_turn, one_batch, prompts, spec
from .toy_tokenizer import EOS, ToyTokenizer

pytestmark = pytest.mark.anyio

TOKENIZER = ToyTokenizer({40: "R", 41: "S"})
LONG = Sampling(200)


def says(text: str) -> Reply:
    return Reply([*TOKENIZER.encode(text), EOS])


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


async def run_tools(
    *replies: Reply | Callable[[Attempt], Reply], loop: ToolLoop
) -> tuple[ScriptedController, list[str], list[str]]:
    """Runs one sample; returns the controller, the texts of its turns, and what stands between them."""
    controller = ScriptedController(in_turn(*replies))
    task = spec(prompts=["q"], loop=loop, group_size=1, sampling=LONG)
    batch, _ = await one_batch(controller, task, tokenizer=TOKENIZER)
    (sample,) = batch.samples
    check_sample(sample)
    (segment,) = sample.segments
    between, at = [], 0
    for turn in sample.turns:
        between.append(TOKENIZER.decode(segment.ids.tolist()[at : turn.start]))
        at = turn.stop
    assert sum(segment.mask) == sample.policy_tokens == sum(map(len, sample.turns))
    return controller, [turn.text or "" for turn in sample.turns], between[1:]


async def test_bug_054_malformed_json_is_told_to_the_model() -> None:
    calls: list[int] = []

    async def add(a: int) -> str:
        calls.append(a)
        return "R"

    text = '<tool_call>{"a":</tool_call>'
    _, turns, between = await run_tools(says(text), says("ok"), loop=ToolLoop([add]))
    assert calls == []
    assert turns == [text, "ok"]
    assert "no valid JSON" in between[0]


async def test_bug_055_a_loop_has_a_bound() -> None:
    async def again() -> str:
        return "R"

    controller, _, _ = await run_tools(says(call("again")), loop=ToolLoop([again]))
    assert len(controller.prompts) == 8
    controller, _, _ = await run_tools(says("only thoughts"), loop=ToolLoop([again]))
    assert len(controller.prompts) == 1


async def test_bug_055_reaching_the_bound_is_no_failure() -> None:
    async def again() -> str:
        return "R"

    controller = ScriptedController(in_turn(says(call("again"))))
    task = spec(prompts=["q"], loop=ToolLoop([again], max_turns=3), sampling=LONG, group_size=1)
    batch, _ = await one_batch(controller, task, tokenizer=TOKENIZER)
    (sample,) = batch.samples
    assert (sample.status, sample.finish_reason) == (Status.COMPLETED, "max_turns")
    assert len(sample.turns) == 3
    assert sample.segments[0].ids[-1] == EOS  # no result follows a call that nobody reads


async def test_bug_056_each_call_has_one_result() -> None:
    async def result() -> str:
        return "RS"

    controller, _, between = await run_tools(
        says(call("result")), says("ok"), loop=ToolLoop([result])
    )
    assert between == ["RS"]
    assert controller.prompts[1].count(40) == controller.prompts[1].count(41) == 1


async def test_bug_058_a_stubborn_tool_is_left_behind_at_its_limit() -> None:
    begun, release = threading.Event(), threading.Event()
    said: list[str] = []

    async def until_begun() -> None:
        while not begun.is_set():  # time can't jump while this runs
            await checkpoint()

    def stubborn() -> str:
        begun.set()
        release.wait(20)
        return "late"

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        try:
            await rollout.tool(stubborn)
        except ToolError as error:
            said.append(str(error))

    task = spec(loop=loop, group_size=1, limits=Limits(tool=0.1))
    controller = ScriptedController()
    warned = pytest.warns(RuntimeWarning, match="tool stubborn of task/")
    with free_running_threads(), warned:
        async with Engine(controller, task, exit_grace=0.2) as engine:
            before = current_time()
            async with create_task_group() as group:
                group.start_soon(until_begun)
                await engine.next_batch(1)
            assert current_time() - before < 0.5
            assert engine.statistics().abandoned_threads == 1
    release.set()
    assert said == ["tool stubborn took over 0.1 s"]


@pytest.mark.parametrize(("length", "caps"), [(8, [2]), (10, [])])
async def test_bug_059_the_cap_is_what_the_context_leaves(length: int, caps: list[int]) -> None:
    seen: list[int] = []

    def script(attempt: Attempt) -> Reply:
        seen.append(attempt.max_tokens)
        return Reply([5] * 9)

    prompt = Prompt("p", token_ids=[2] * length)
    task = spec(prompts=[prompt], group_size=1, sampling=Sampling(5), starve_after=1)
    async with Engine(ScriptedController(script, max_context=10), task) as engine:
        if caps:
            (sample,) = (await engine.next_batch(1)).samples
            assert sample.truncated
        else:
            with pytest.raises(Starved, match="leaves no room"):
                await engine.next_batch(1)
    assert seen == caps


async def test_bug_059_earlier_turns_are_kept_when_the_context_is_full() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([40] * 3)
        if not rollout.done:
            await rollout.generate()

    controller = ScriptedController(in_turn(Reply([5, 6, EOS])), max_context=10)
    prompt = Prompt("p", token_ids=[2] * 5)
    batch, _ = await one_batch(controller, spec(prompts=[prompt], loop=loop, group_size=1))
    (sample,) = batch.samples
    assert len(controller.prompts) == 1
    assert (sample.status, sample.finish_reason) == (Status.COMPLETED, "length")
    assert sample.segments[0].ids.tolist() == [5, 6, EOS]  # trailing context is trimmed


async def test_bug_060_a_sample_has_one_truncation_flag() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=5)
        if rollout.index == 0:
            rollout.append([40])
            await rollout.generate(max_tokens=1)

    def script(attempt: Attempt) -> Reply:
        return Reply([5, 6, EOS])

    batch, _ = await one_batch(ScriptedController(script), spec(loop=loop))
    first, second = batch.samples
    assert [turn.finish_reason for turn in first.turns] == ["stop", "length"]
    assert [first.truncated, second.truncated] == [True, False]
    assert batch.statistics.truncated == 1


async def test_bug_062_unknown_tools_and_malformed_calls_go_one_way() -> None:
    async def known() -> str:
        return "R"

    for attempt in (call("nope"), "<tool_call>{</tool_call>", call("known", '{"x": 1}')):
        _, turns, between = await run_tools(says(attempt), says("ok"), loop=ToolLoop([known]))
        assert turns == [attempt, "ok"]
        assert between[0].startswith("error: ")


async def test_bug_057_other_samples_go_on_when_a_tools_error_handler_fails() -> None:
    def tool() -> None:
        try:
            raise ValueError("first")
        except ValueError:
            raise NameError("handler") from None

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.prompt.uid == "p0":
            await rollout.tool(tool)

    batch, engine = await one_batch(
        ScriptedController(), spec(loop=loop, shuffle=False, prompts=prompts(3)), 1
    )
    assert batch.groups[0].prompt.uid == "p1"
    assert engine.statistics().tasks["task"].dropped == {"tool": 1}


async def test_bug_103_a_loop_that_never_asks_the_policy_has_failed() -> None:
    async def loop(rollout: Rollout) -> None:
        if rollout.prompt.uid != "p0":
            await rollout.generate()

    recording = RecordingInstrument()
    task = spec(loop=loop, group_size=1, shuffle=False)
    async with Engine(ScriptedController(), task, instruments=[recording]) as engine:
        batch = await engine.next_batch(1)
    assert batch.groups[0].prompt.uid == "p1"
    (dead,) = [s for s in recording.samples if s.prompt.uid == "p0"]
    assert (dead.status, dead.reward) == (Status.FAILED, None)
    assert dead.failure is not None
    assert "without generating" in dead.failure.message


async def test_a_cancelled_tool_stays_cancelled() -> None:
    ended: list[str] = []

    async def tool() -> None:
        try:
            await sleep_forever()
        finally:
            ended.append("tool")

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        try:
            await rollout.tool(tool)
        except ToolError:
            ended.append("not this")

    task = spec(loop=loop, group_size=1, limits=Limits(tool=None))
    async with Engine(ScriptedController(), task) as engine:
        with move_on_after(5):
            await engine.next_batch(1)
    assert ended == ["tool"]
