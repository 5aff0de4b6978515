"""Loops that are evicted and run again: they go on where they were."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import anyio
import pytest
from anyio import create_task_group, sleep
from anyio.lowlevel import checkpoint

from rollnest import (
    AsyncStrategy,
    Batch,
    Engine,
    PauseMode,
    Rollout,
    Sample,
    Sampling,
    SyncStrategy,
    TaskSpec,
    register_codec,
    tool_key,
)
from rollnest.abc import Attempt
from rollnest.errors import JudgeError, LoopError, ToolError
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
    check_sample,
)

from .helpers import prompts, spec
from .toy_tokenizer import ToyTokenizer

pytestmark = pytest.mark.anyio

Backend = Literal["asyncio", "trio"]


async def take(got: list[Batch], engine: Engine, n: int = 1) -> None:
    got.append(await engine.next_batch(n))


async def evicted(engine: Engine, *times: float) -> Batch:
    """Takes a batch of one group, evicting it at these times."""
    got: list[Batch] = []
    started = anyio.current_time()
    async with create_task_group() as group:
        group.start_soon(take, got, engine)
        for at in times:
            await anyio.sleep_until(started + at)
            async with engine.paused(PauseMode.EVICT):
                assert engine.statistics().total("flight") == 0
                assert_conserved(engine)
    return got[0]


async def tool_turns(rollout: Rollout) -> None:
    """Three turns with a tool after each."""
    for number in range(3):
        await rollout.generate()
        answer = await rollout.tool(look_up, number)
        rollout.append([answer])


calls: list[int] = []


async def look_up(number: int) -> int:
    calls.append(number)
    await sleep(1)
    return 500 + number


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


def task_of(loop: Any, **options: Any) -> TaskSpec:
    """A task whose turns take 2 s, one second a token, and whose tools take 1 s."""
    defaults = {"group_size": 1, "sampling": Sampling(2), "judger": None, "shuffle": False}
    return spec(loop=loop, **(defaults | options))


def server(**options: Any) -> ScriptedController:
    return ScriptedController(rate=1.0, stop_every=10_000, **options)


def columns(sample: Sample) -> list[tuple[list[int], list[int], list[int]]]:
    """What a sample holds; its contexts in an order of their own."""
    return sorted((s.prompt_ids.tolist(), s.ids.tolist(), s.mask.tolist()) for s in sample.segments)


async def test_a_tool_loop_goes_on_after_its_second_turn() -> None:
    async with Engine(server(), task_of(tool_turns)) as engine:
        (whole,) = (await engine.next_batch(1)).samples
    assert calls == [0, 1, 2]
    calls.clear()
    controller = server()
    async with Engine(controller, task_of(tool_turns)) as engine:
        # Turns are on at 0 to 2, 3 to 5, 6 to 8; tools between.
        (sample,) = (await evicted(engine, 6.5)).samples
        statistics = engine.statistics().tasks["task"]
    assert columns(sample) == columns(whole)
    assert calls == [0, 1, 2]
    assert (
        len(controller.prompts) == 4
    )  # the third turn was aborted without a token, and asked for once more
    assert controller.prompts[2] == controller.prompts[3]
    assert (statistics.redrawn, statistics.replayed_turns, statistics.diverged) == (1, 2, 0)
    assert statistics.tokens_discarded == 0
    check_sample(sample)


async def test_a_partial_turn_goes_on_with_what_remains_of_its_cap() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    task = task_of(tool_turns, sampling=Sampling(5), strategy=SyncStrategy(max_staleness=1))
    got: list[Batch] = []
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(take, got, engine)
        await sleep(8.5)  # in the second turn, with two tokens
        async with engine.paused(PauseMode.EVICT) as pause:
            await pause.update_weights({})
    (sample,) = got[0].samples
    assert sample.turns[1].attempts == 2
    assert sample.turns[1].response.version_runs == ((0, 0, 2), (1, 2, 5))
    assert [len(turn) for turn in sample.turns] == [5, 5, 5]
    assert calls == [0, 1, 2]
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.parametrize("on_unknown", ["rerun", "fail"])
async def test_a_tool_that_was_cut_follows_on_unknown(on_unknown: Any) -> None:
    keys: list[str] = []

    async def book(seat: int) -> str:
        keys.append(tool_key())
        await sleep(1)
        return "booked"

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.tool(look_up, 7)
        await rollout.tool(book, 1, on_unknown=on_unknown)
        await rollout.generate()

    task = task_of(loop, prompts=prompts(2), epochs=1)
    async with Engine(server(), task) as engine:
        batch = await evicted(engine, 3.5)
        dropped = engine.statistics().tasks["task"].dropped
    assert calls == [7] if on_unknown == "rerun" else [7, 7]
    if on_unknown == "rerun":
        assert batch.groups[0].prompt.uid == "p0"
        assert keys == ["task/p0/0/0/2"] * 2
    else:
        assert batch.groups[0].prompt.uid == "p1"
        assert dropped == {"tool": 1}
        assert keys == ["task/p0/0/0/2", "task/p1/1/0/2"]


async def test_a_recorded_error_is_raised_again() -> None:
    said: list[str] = []

    async def broken() -> None:
        calls.append(-1)
        raise KeyError("k")

    async def loop(rollout: Rollout) -> None:
        try:
            await rollout.tool(broken)
        except ToolError as error:
            said.append(str(error))
        await rollout.generate()

    async with Engine(server(), task_of(loop)) as engine:
        await evicted(engine, 1.0)
    assert calls == [-1]
    assert said == ["tool broken raised KeyError: 'k'"] * 2


@pytest.mark.parametrize("drifts", [False, True])
async def test_a_tool_with_a_state_of_its_own_runs_again_and_must_do_the_same(drifts: bool) -> None:
    lives: list[list[str]] = []

    async def loop(rollout: Rollout) -> None:
        moves: list[str] = []
        lives.append(moves)

        async def move(where: str) -> list[str]:
            moves.append(where)
            return [*moves, *(["drift"] if drifts and len(lives) == 2 else [])]

        await rollout.tool(move, "up", replay="rerun")
        await rollout.generate()
        rollout.append([len(await rollout.tool(move, "left", replay="rerun"))])
        await rollout.generate()

    async with Engine(server(), task_of(loop)) as engine:
        (sample,) = (await evicted(engine, 3.0)).samples
        statistics = engine.statistics().tasks["task"]
    check_sample(sample)
    if drifts:
        assert lives == [["up", "left"], ["up"], ["up", "left"]]
        assert (statistics.restarted, statistics.tokens_discarded) == (1, 3)
        assert statistics.replayed_turns == 0
    else:
        assert lives == [["up", "left"]] * 2
        assert (statistics.restarted, statistics.tokens_discarded) == (0, 0)
        assert statistics.replayed_turns == 1


async def test_a_loop_that_swallows_the_restart_begins_anew_all_the_same() -> None:
    lives = 0

    async def life() -> int:
        return lives

    async def loop(rollout: Rollout) -> None:
        nonlocal lives
        lives += 1
        try:
            await rollout.tool(life, replay="rerun")
        except LoopError:
            with pytest.raises(LoopError, match="began anew"):
                await rollout.tool(look_up, 1)
            with pytest.raises(LoopError):
                await rollout.generate()
            return
        await rollout.generate()

    async with Engine(server(), task_of(loop)) as engine:
        (sample,) = (await evicted(engine, 1.0)).samples
    assert lives == 3
    assert len(sample.turns) == 1


async def test_a_loop_that_reads_the_clock_diverges_and_is_right_all_the_same() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([700 + int(anyio.current_time())])
        await rollout.generate()
        await rollout.tool(look_up, 3)
        await rollout.generate()

    controller = server()
    async with Engine(controller, task_of(loop)) as engine:
        (sample,) = (await evicted(engine, 6.0)).samples
        statistics = engine.statistics().tasks["task"]
    check_sample(sample)
    assert sample.segments[0].ids[2] == 706
    # The second turn, its tool and what had come of the third were given up.
    assert (statistics.diverged, statistics.tokens_discarded) == (1, 3)
    assert calls == [3, 3]
    assert_conserved(engine, committed=controller.committed)


async def test_what_a_loop_does_not_ask_for_again_is_given_up() -> None:
    lives = 0

    async def loop(rollout: Rollout) -> None:
        nonlocal lives
        lives += 1
        for _ in range(1 if lives == 2 else 3):
            await rollout.generate()

    controller = server()
    async with Engine(controller, task_of(loop)) as engine:
        (sample,) = (await evicted(engine, 5.0)).samples
        statistics = engine.statistics().tasks["task"]
    assert len(sample.turns) == 1
    assert (statistics.diverged, statistics.tokens_discarded) == (1, 3)
    assert_conserved(engine, committed=controller.committed)


async def test_draws_come_again() -> None:
    drawn: list[list[float]] = []

    async def loop(rollout: Rollout) -> None:
        mine: list[float] = []
        drawn.append(mine)
        for _ in range(3):
            mine.append(rollout.random.random())
            await rollout.generate(max_tokens=rollout.random.randint(1, 2))
            rollout.append([rollout.random.randrange(600)])

    async with Engine(server(), task_of(loop), seed=5) as engine:
        await evicted(engine, 2.5)
        assert engine.statistics().total("diverged") == 0
    first, second = drawn
    assert second[: len(first)] == first


async def test_a_judged_verdict_is_recorded() -> None:
    asked: list[int] = []

    async def judge(sample: Sample) -> float:
        asked.append(sample.policy_tokens)
        if len(asked) == 1:
            raise ValueError("not yet")
        return 0.5 + len(asked)

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        with pytest.raises(JudgeError, match="not yet"):
            await rollout.judge()
        verdict = await rollout.judge()
        rollout.append([int(verdict.score)])
        await rollout.generate()
        rollout.score(verdict.score)

    async with Engine(server(), task_of(loop, judger=judge)) as engine:
        (sample,) = (await evicted(engine, 3.0)).samples
    assert asked == [2, 2]
    assert sample.reward == 2.5
    assert [len(turn) for turn in sample.turns] == [2, 2]


async def test_a_member_that_is_too_old_when_it_is_drawn_again_begins_anew() -> None:
    controller = server()
    task = task_of(tool_turns, strategy=SyncStrategy(max_staleness=1))
    got: list[Batch] = []
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(take, got, engine)
        await sleep(4.0)
        async with engine.paused(PauseMode.EVICT) as pause:
            await pause.update_weights({}, 2)
    (sample,) = got[0].samples
    assert sample.oldest_version == 2
    assert calls == [0, 0, 1, 2]
    statistics = engine.statistics().tasks["task"]
    assert (statistics.tokens_expired, statistics.dropped) == (3, {})
    assert (statistics.replayed_turns, statistics.diverged) == (0, 0)
    assert_conserved(engine, committed=controller.committed)


async def test_evictions_never_use_up_a_retry() -> None:
    controller = server()
    async with Engine(controller, task_of(tool_turns)) as engine:
        (sample,) = (await evicted(engine, *[0.7 * (i + 1) for i in range(12)])).samples
        statistics = engine.statistics().tasks["task"]
    assert statistics.redrawn == 12
    assert statistics.dropped == {}
    assert len(sample.turns) == 3
    assert calls[-1] == 2
    assert_conserved(engine, committed=controller.committed)


class Uncodable:
    """Something that its codec can't keep."""


def encode_nothing(_: Uncodable) -> object:
    raise ZeroDivisionError


def decode_nothing(_: object) -> Uncodable:
    return Uncodable()


async def test_a_tools_result_is_refused_before_its_effect_where_that_is_known() -> None:
    register_codec(Uncodable, encode=encode_nothing, decode=decode_nothing)
    effects: list[str] = []

    async def says_so() -> range:
        effects.append("said")
        return range(3)

    async def says_nothing(_: object = None) -> Any:
        effects.append("unsaid")
        return {1, 2}

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        with pytest.raises(LoopError, match=r"tool says_so returns a range, .*register_codec"):
            await rollout.tool(says_so)
        with pytest.raises(LoopError, match=r"tool says_nothing returned a set, .*register_codec"):
            await rollout.tool(says_nothing)
        with pytest.raises(LoopError, match=r"tool says_nothing was given a .*Uncodable that its"):
            await rollout.tool(partial(says_nothing, Uncodable()))
        with pytest.raises(ValueError, match="replay must be"):
            await rollout.tool(look_up, 1, replay="never")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="on_unknown must be"):
            await rollout.tool(look_up, 1, on_unknown="ask")  # type: ignore[call-overload]

    async with Engine(server(), task_of(loop)) as engine:
        await engine.next_batch(1)
    assert effects == ["unsaid"]
    assert calls == []


async def test_a_recorded_result_does_not_change_with_what_the_loop_does_to_it() -> None:
    seen: list[list[int]] = []

    async def rows() -> list[int]:
        calls.append(0)
        return [1]

    async def loop(rollout: Rollout) -> None:
        answer = await rollout.tool(rows)
        seen.append(list(answer))
        answer.append(2)
        await rollout.generate()

    async with Engine(server(), task_of(loop)) as engine:
        await evicted(engine, 0.5, 1.0)
    assert seen == [[1]] * 3
    assert calls == [0]


async def test_the_key_of_a_tool_is_known_in_its_thread_and_nowhere_else() -> None:
    keys: list[str] = []

    def in_thread() -> None:
        keys.append(tool_key())

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.tool(in_thread)
        with pytest.raises(LoopError, match="outside of a tool"):
            tool_key()

    async with Engine(server(), task_of(loop)) as engine:
        await engine.next_batch(1)
    assert keys == ["task/p0/0/0/1"]


async def test_no_derived_seed_comes_twice() -> None:
    seeds: list[int | str | None] = []

    def script(attempt: Attempt) -> Reply:
        seeds.append(attempt.sampling.seed)
        return Reply([5, 6], finish="length", delay=2.0)

    async def loop(rollout: Rollout) -> None:
        for _ in range(3):
            await rollout.generate()

    task = task_of(loop, sampling=Sampling(2, seed="derived"))
    async with Engine(ScriptedController(script), task) as engine:
        await evicted(engine, 3.2, 5.0)
    assert len(seeds) == 5
    assert len(set(seeds)) == 5


@pytest.mark.parametrize("opened", [False, True])
async def test_a_part_that_is_ahead_leaves_the_others_what_they_had(opened: bool) -> None:
    """One context goes on live while another has not been given again what it holds."""
    caps: dict[int, list[int]] = {7: [], 8: []}
    lives = 0

    def script(attempt: Attempt) -> Reply:
        caps[attempt.prompt_ids[0]].append(attempt.max_tokens)
        return Reply([5] * 8, finish="length", delay=2.0)

    async def loop(rollout: Rollout) -> None:
        nonlocal lives
        lives += 1
        late = rollout.segment([8]) if opened else None

        async def ahead() -> None:
            context = rollout.segment([7])
            await context.generate(max_tokens=4)
            await context.generate(max_tokens=99)

        async def behind() -> None:
            if lives > 1:
                await sleep(0.5)
            context = rollout.segment([8]) if late is None else late
            await context.generate(max_tokens=8)

        async with create_task_group() as group:
            group.start_soon(ahead)
            group.start_soon(behind)

    task = task_of(loop, max_response_tokens=20, sampling=Sampling(99))
    async with Engine(ScriptedController(script), task) as engine:
        (sample,) = (await evicted(engine, 2.2)).samples
    check_sample(sample, max_response_tokens=20)
    assert caps == {7: [4, 8, 8], 8: [8]}
    assert sample.policy_tokens == 20


async def test_a_turn_that_is_cut_when_its_answer_is_whole_has_ended() -> None:
    class Slow(ScriptedController):
        async def generate(self, attempt: Attempt) -> None:
            await super().generate(attempt)
            await sleep(1.0)  # closes its connection

    async def loop(rollout: Rollout) -> None:
        with anyio.move_on_after(2.5):
            await rollout.generate()
        await rollout.generate()

    controller = Slow(lambda attempt: Reply([5, 6], finish="length", delay=2.0))
    async with Engine(controller, task_of(loop)) as engine:
        (sample,) = (await evicted(engine, 4.0)).samples
        statistics = engine.statistics().tasks["task"]
    assert [turn.finish_reason for turn in sample.turns] == ["length", "length"]
    assert (statistics.replayed_turns, statistics.diverged) == (1, 0)
    assert len(controller.prompts) == 3


@pytest.mark.parametrize("steps", range(12))
async def test_evicted_again_before_there_is_anything_to_run(steps: int) -> None:
    async def loop(rollout: Rollout) -> None:
        for _ in range(2):
            await rollout.generate()

    controller = ScriptedController(lambda attempt: Reply([5, 6], delay=2.0))
    task = task_of(loop, prompts=["q"], group_size=2)  # rendered in a thread
    got: list[Batch] = []
    heard = RecordingInstrument()
    tokenizer = ToyTokenizer({2: "q", 5: "a", 6: "b"}, stops=[6])
    async with (
        Engine(controller, task, tokenizer=tokenizer, instruments=[heard]) as engine,
        create_task_group() as group,
    ):
        group.start_soon(take, got, engine)
        await sleep(2.5)
        for _ in range(3):
            async with engine.paused(PauseMode.EVICT):
                assert_conserved(engine, committed=controller.committed)
            for _ in range(steps):
                await checkpoint()
                assert_conserved(engine, committed=controller.committed)
    for cut, _ in heard.groups:
        assert [len(sample.segments) for sample in cut.samples] == [1, 1]
    for sample in got[0].samples:
        assert sample.segments[0].ids.tolist() == [5, 6, 5, 6]
        assert sample.segments[0].prompt_ids.tolist() == [2]
        assert len(sample.segments) == 1
    statistics = engine.statistics().tasks["task"]
    assert statistics.diverged == 0
    assert statistics.members == 2


async def test_without_partials_a_turn_that_its_loop_cut_begins_again() -> None:
    async def loop(rollout: Rollout) -> None:
        with anyio.move_on_after(2.5):
            await rollout.generate(max_tokens=4)
        await rollout.generate()

    controller = server(stream=True)
    task = task_of(loop, strategy=AsyncStrategy(partial=False))
    async with Engine(controller, task, batch_size=1) as engine:
        (sample,) = (await evicted(engine, 3.2)).samples
        statistics = engine.statistics().tasks["task"]
    check_sample(sample)
    assert [len(turn) for turn in sample.turns] == [2, 2]
    assert (statistics.restarted_turns, statistics.replayed_turns) == (1, 0)
    assert statistics.tokens_discarded == 2
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.2, 2.7, 3.5])
@pytest.mark.parametrize("first", [3.5, 4.5])
async def test_a_turn_that_its_loop_had_cut_may_be_cut_again_after_it_went_on(
    first: float, seconds: float
) -> None:
    """What began after it followed from it as it was, so the rest of the record is given up."""

    async def loop(rollout: Rollout) -> None:
        with anyio.move_on_after(2.5):
            await rollout.generate(max_tokens=8)
        rollout.append([700])
        await rollout.generate(max_tokens=4)

    controller = server(stream=True)
    task = task_of(loop, prompts=prompts(1), epochs=1, sampling=Sampling(8))
    got: list[Batch] = []
    async with Engine(controller, task) as engine, create_task_group() as group:

        async def wait() -> None:
            got.append(await engine.next_batch(1, wait_in_pause=True))

        group.start_soon(wait)
        for at in (first, seconds):
            await sleep(at)
            async with engine.paused(PauseMode.EVICT):
                assert_conserved(engine, committed=controller.committed)
        await sleep(100)
        assert_conserved(engine, committed=controller.committed)
    (sample,) = got[0].samples
    check_sample(sample)
    assert len(sample.turns) == 2
