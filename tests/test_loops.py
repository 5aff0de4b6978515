"""Agent loops: the handle's calls, tools, budgets, segments, chat."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from anyio import create_task_group, sleep

from rollnest import (
    AgentLoop,
    Capacity,
    Engine,
    Limits,
    Message,
    Prompt,
    Rollout,
    Sampling,
    SingleTurnLoop,
    Status,
    ToolLoop,
)
from rollnest.errors import LoopError, Starved, ToolError
from rollnest.testing import RecordingInstrument, Reply, ScriptedController, check_sample

from .helpers import in_turn, one_batch, prompts, spec
from .toy_tokenizer import EOS, ToyTokenizer

pytestmark = pytest.mark.anyio


async def sample_of(loop: Any, controller: ScriptedController | None = None, **options: Any) -> Any:
    """Runs one sample of a loop and returns it."""
    tokenizer = options.pop("tokenizer", None)
    capacity = options.pop("capacity", Capacity())
    task = spec(loop=loop, group_size=1, starve_after=1, **options)
    batch, _ = await one_batch(
        controller or ScriptedController(), task, tokenizer=tokenizer, capacity=capacity
    )
    (sample,) = batch.samples
    check_sample(sample, max_response_tokens=options.get("max_response_tokens"))
    return sample


async def failure_of(loop: Any, **options: Any) -> str:
    """Runs one sample of a loop that fails and returns why."""
    with pytest.raises(Starved) as caught:
        await sample_of(loop, **options)
    return str(caught.value)


def test_a_loop_is_an_agent_loop_or_an_async_function() -> None:
    class Callable:
        async def __call__(self, rollout: Rollout) -> None:
            await rollout.generate()

    assert isinstance(spec(loop=Callable()).loop, AgentLoop)
    assert isinstance(spec().loop, SingleTurnLoop)
    with pytest.raises(TypeError, match="loop must be an AgentLoop or an async function"):
        spec(loop=lambda rollout: None)


async def test_random_is_seeded_by_engine_prompt_visit_and_index() -> None:
    drawn: dict[str, float] = {}

    async def loop(rollout: Rollout) -> None:
        drawn[rollout.uid] = rollout.random.random()
        await rollout.generate()

    async def draw(seed: int) -> dict[str, float]:
        drawn.clear()
        await one_batch(ScriptedController(), spec(loop=loop, shuffle=False), 2, seed=seed)
        return dict(drawn)

    first = await draw(1)
    assert len(set(first.values())) == 4
    assert first == await draw(1)
    assert first != await draw(2)


async def test_finish_names_the_reason_and_fail_fails() -> None:
    async def finish(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.finish("gave up")
        assert rollout.done
        with pytest.raises(LoopError, match="finished"):
            await rollout.generate()

    sample = await sample_of(finish)
    assert (sample.status, sample.finish_reason) == (Status.COMPLETED, "gave up")

    async def fail(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.fail("the sandbox is gone")

    assert "the sandbox is gone" in await failure_of(fail)


async def test_appends_that_do_not_fit_are_cut_and_trimmed() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=4)
        assert rollout.remaining == 6
        rollout.append([40] * 7)
        assert rollout.done
        with pytest.raises(LoopError, match="budget is used up"):
            await rollout.generate()

    sample = await sample_of(loop, ScriptedController(stop_every=10_000), max_response_tokens=10)
    assert sample.finish_reason == "length"
    assert sample.truncated
    assert len(sample.segments[0]) == 4


async def test_a_turn_without_room_is_empty_and_the_next_fails() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        assert rollout.done
        turn = await rollout.generate()
        assert (len(turn), turn.finish_reason, turn.attempts) == (0, "length", 0)
        with pytest.raises(LoopError):
            await rollout.generate()

    controller = ScriptedController(stop_every=10_000)
    sample = await sample_of(loop, controller, max_response_tokens=5)
    assert len(controller.prompts) == 1
    assert sample.policy_tokens == 5


async def test_text_needs_a_tokenizer() -> None:
    async def loop(rollout: Rollout) -> None:
        rollout.append("text")

    assert "needs the engine to have a tokenizer" in await failure_of(loop)

    async def chat(rollout: Rollout) -> None:
        await rollout.chat([{"role": "user", "content": "q"}])

    assert "needs the engine to have a tokenizer" in await failure_of(chat)
    assert "needs the engine to have a tokenizer" in await failure_of(ToolLoop([]))


async def test_appended_text_is_encoded_as_it_is() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append("AB")
        await rollout.generate()

    controller = ScriptedController(in_turn(Reply([5, EOS]), Reply([6, EOS])))
    sample = await sample_of(loop, controller, tokenizer=ToyTokenizer({40: "A", 41: "B"}))
    assert sample.segments[0].ids.tolist() == [5, 9, 40, 41, 6, 9]


@pytest.mark.parametrize("ids", [[-1], [1.5], ["a"], [10**12], [1000]])
async def test_ids_that_are_none_fail_the_sample_and_change_nothing(ids: list[Any]) -> None:
    held: list[int] = []

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        try:
            rollout.append(ids)
        finally:
            held.append(len(rollout.response) - len(rollout.turns[0]))

    await failure_of(loop)
    assert held == [0]


async def test_one_turn_at_a_time_in_one_context() -> None:
    async def loop(rollout: Rollout) -> None:
        async with create_task_group() as group:
            group.start_soon(rollout.generate)
            await sleep(0.1)
            with pytest.raises(LoopError, match="two generate"):
                await rollout.generate()
            with pytest.raises(LoopError, match="while generate"):
                rollout.append([1])

    await sample_of(loop, ScriptedController(rate=1.0))


async def test_segments_run_side_by_side_and_through_a_pause() -> None:
    async def loop(rollout: Rollout) -> None:
        others = [rollout.segment([7, i]) for i in range(3)]
        async with create_task_group() as group:
            for context in others:
                group.start_soon(context.generate)
            await rollout.generate()

    controller = ScriptedController(rate=1.0, stop_every=10_000)
    recording = RecordingInstrument()
    task = spec(loop=loop, group_size=1, sampling=Sampling(4))
    async with (
        Engine(controller, task, instruments=[recording]) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await sleep(2.5)
        assert len(controller.open) == 4
        async with engine.paused():
            assert not controller.open
    (sample,) = recording.samples
    check_sample(sample)
    assert [len(segment) for segment in sample.segments] == [4, 4, 4, 4]
    assert sorted(turn.segment for turn in sample.turns) == [0, 1, 2, 3]
    assert {turn.attempts for turn in sample.turns} == {2}


async def test_a_failing_segment_fails_the_sample_only() -> None:
    async def loop(rollout: Rollout) -> None:
        async with create_task_group() as group:
            group.start_soon(rollout.generate)
            if rollout.prompt.uid == "p0":
                group.start_soon(rollout.segment([]).generate)
                raise KeyError("mine")

    batch, engine = await one_batch(ScriptedController(), spec(loop=loop, shuffle=False))
    assert batch.groups[0].prompt.uid == "p1"
    assert engine.statistics().tasks["task"].dropped == {"loop": 1}


async def test_chat_attaches_to_the_prompt_and_goes_on() -> None:
    async def loop(rollout: Rollout) -> None:
        messages: list[Message] = list(rollout.prompt.messages or ())
        for question in ("r", "s"):
            turn = await rollout.chat(messages)
            messages += [turn.message, {"role": "user", "content": question}]
        await rollout.chat(messages)

    tokenizer = ToyTokenizer({2: "q", 3: "r", 4: "s", 5: "a", 6: "b", 7: "c"}, header=[8])
    controller = ScriptedController(in_turn(Reply([5, EOS]), Reply([6, EOS]), Reply([7, EOS])))
    sample = await sample_of(loop, controller, tokenizer=tokenizer, prompts=["q"])
    (segment,) = sample.segments
    assert segment.prompt_ids.tolist() == [2, 8]
    assert segment.ids.tolist() == [5, 9, 3, 8, 6, 9, 4, 8, 7, 9]


async def test_append_messages_renders_anew_where_the_template_rewrites() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append_messages([{"role": "user", "content": "r"}])
        await rollout.generate()

    tokenizer = ToyTokenizer({2: "q", 3: "r", 5: "a", 6: "b"}, rewrites=True)
    controller = ScriptedController(in_turn(Reply([5, EOS]), Reply([6, EOS])))
    sample = await sample_of(loop, controller, tokenizer=tokenizer, prompts=["q"])
    rows = [(s.prompt_ids.tolist(), s.ids.tolist()) for s in sample.segments]
    assert rows == [([2], [5, 9]), ([2, 5, 9, 3], [6, 9])]


async def test_append_messages_takes_no_assistant_and_needs_to_know_what_came_before() -> None:
    async def assistant(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append_messages([{"role": "assistant", "content": "r"}])

    tokenizer = ToyTokenizer({2: "q"}, rewrites=True)
    assert "no assistant messages" in await failure_of(
        assistant, tokenizer=tokenizer, prompts=["q"]
    )

    async def unknown(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append_messages([{"role": "user", "content": "r"}])

    ids = [Prompt("p", token_ids=[2])]
    assert "messages are not known" in await failure_of(unknown, tokenizer=tokenizer, prompts=ids)


async def test_tools_run_in_threads_or_on_the_loop() -> None:
    where: dict[str, threading.Thread] = {}

    def sync(a: int) -> int:
        where["sync"] = threading.current_thread()
        return a + 1

    async def on_loop(a: int) -> int:
        where["async"] = threading.current_thread()
        return a + 2

    def returns_awaitable(a: int) -> Any:
        return on_loop(a)

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        assert await rollout.tool(sync, 1) == 2
        assert await rollout.tool(on_loop, 1) == 3
        assert await rollout.tool(returns_awaitable, 1) == 3

    await sample_of(loop)
    assert where["sync"] is not where["async"] is threading.current_thread()


async def test_a_tools_error_and_limit_are_tool_errors() -> None:
    async def slow() -> None:
        await sleep(100)

    def broken() -> None:
        raise KeyError("k")

    said: list[str] = []

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        for tool in (slow, broken):
            try:
                await rollout.tool(tool)
            except ToolError as error:
                said.append(str(error))

    await sample_of(loop, limits=Limits(tool=2.0))
    assert said == ["tool slow took over 2.0 s", "tool broken raised KeyError: 'k'"]


async def test_a_tools_limit_stands_still_while_paused() -> None:
    async def tool() -> str:
        await sleep(50)
        return "done"

    answers: list[str] = []

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        answers.append(await rollout.tool(tool))

    task = spec(loop=loop, group_size=1, limits=Limits(tool=10.0))
    async with Engine(ScriptedController(), task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(1)
        async with engine.paused():
            await sleep(100)
    assert answers == ["done"]


async def test_tool_slots_are_a_bound() -> None:
    now, most = 0, 0

    async def tool() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await sleep(1)
        now -= 1

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.tool(tool)

    await one_batch(ScriptedController(), spec(loop=loop, group_size=8), capacity=Capacity(tools=3))
    assert most == 3


async def test_a_loops_own_task_group_and_except_exception() -> None:
    ended: list[str] = []

    async def helper() -> None:
        try:
            await sleep(1000)
        finally:
            ended.append("helper")

    async def loop(rollout: Rollout) -> None:
        try:
            async with create_task_group() as group:
                group.start_soon(helper)
                await rollout.generate()
                group.cancel_scope.cancel()
        except Exception:
            ended.append("never")

    await sample_of(loop)
    assert ended == ["helper"]


async def test_errors_of_several_tasks_are_attributed_to_the_first_boundary() -> None:
    async def loop(rollout: Rollout) -> None:
        async def fail() -> None:
            def broken() -> None:
                raise OSError("down")

            await rollout.tool(broken)

        async with create_task_group() as group:
            group.start_soon(fail)

    task = spec(loop=loop, group_size=1, starve_after=1)
    async with Engine(ScriptedController(), task) as engine:
        with pytest.raises(Starved) as caught:
            await engine.next_batch(1)
    assert set(caught.value.reasons) == {"tool"}


async def test_what_a_loop_can_look_at() -> None:
    async def loop(rollout: Rollout) -> None:
        assert rollout.prompt.uid == "p0"
        assert rollout.index == 0
        assert rollout.uid == "task/p0/0/0"
        assert not list(rollout.turns)
        assert rollout.remaining == 4096 - 2
        assert "tokens left" in repr(rollout)
        turn = await rollout.generate()
        assert rollout.turns == (turn,)
        assert rollout.response.ids.tolist() == turn.ids.tolist()

    await sample_of(loop, prompts=prompts(1))
