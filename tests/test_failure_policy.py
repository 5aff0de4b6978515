"""What a dead member does to its group, and when the engine gives up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
from anyio import current_time

from rollnest import (
    Engine,
    FailurePolicy,
    LiveGroup,
    Prompt,
    Rollout,
    Sample,
    Sampling,
    Status,
)
from rollnest.abc import Attempt
from rollnest.errors import (
    DataError,
    EngineBroken,
    InferenceError,
    JudgeError,
    LoopError,
    Starved,
    ToolError,
)
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
)

from .helpers import cancelled_at_every_step, each_way, prompts, spec
from .test_group_loops import GroupLoop

pytestmark = pytest.mark.anyio

RETRY = FailurePolicy(on_dead_member="retry")
SHRINK = FailurePolicy(on_dead_member="shrink")


def failing(times: int, *, index: int = 1) -> Callable[[Rollout], Any]:
    """A loop in which one member of each group fails so many times, after its turn."""
    tries: Counter[str] = Counter()

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        key = rollout.uid.split(".")[0]
        if rollout.index == index and tries[key] < times:
            tries[key] += 1
            raise ValueError(f"no, {tries[key]}")

    return loop


async def test_retry_runs_the_member_again_and_fresh() -> None:
    controller, recording = ScriptedController(rate=10.0), RecordingInstrument()
    task = spec(loop=failing(1), failures=RETRY, epochs=1, prompts=prompts(1))
    async with Engine(controller, task, instruments=[recording]) as engine:
        batch = await engine.next_batch(1)
    (group,) = batch.groups
    assert [s.index for s in group.samples] == [0, 1]
    assert [len(s.turns) for s in group.samples] == [1, 1]  # nothing of the first try
    figures = engine.statistics().tasks["task"]
    assert figures.members_shrunk == {"retried": 1}
    assert figures.failures == {"loop": 1}
    assert (figures.members, figures.members_delivered) == (3, 2)
    assert Counter(s.status for s in recording.samples) == {
        Status.COMPLETED: 2,
        Status.FAILED: 1,
    }
    assert_conserved(engine, committed=controller.committed)


async def test_bug_036_a_member_that_always_fails_is_tried_so_often_and_no_more() -> None:
    tries: Counter[str] = Counter()

    async def loop(rollout: Rollout) -> None:
        tries[rollout.prompt.uid] += 1
        if rollout.prompt.uid == "p0":
            raise OSError("poisoned")
        await rollout.generate()

    policy = FailurePolicy(on_dead_member="retry", retries=2)
    task = spec(
        loop=loop, group_size=1, shuffle=False, prompts=prompts(5), epochs=1, failures=policy
    )
    async with Engine(ScriptedController(), task) as engine:
        batch = await engine.next_batch(4)
    assert [group.prompt.uid for group in batch.groups] == ["p1", "p2", "p3", "p4"]
    assert tries["p0"] == 3
    assert engine.statistics().tasks["task"].dropped == {"loop": 1}


async def test_bug_090_a_retry_has_turns_of_its_own_only() -> None:
    tries: list[str] = []

    async def loop(rollout: Rollout) -> None:
        tries.append(rollout.uid)
        await rollout.generate(max_tokens=2)
        if len(tries) == 1:
            raise InferenceError("the transport broke in turn 2")
        await rollout.generate(max_tokens=2)

    controller = ScriptedController(stop_every=10_000)
    task = spec(loop=loop, group_size=1, failures=RETRY, shuffle=False)
    async with Engine(controller, task) as engine:
        batch = await engine.next_batch(1)
    (sample,) = batch.samples
    assert tries == ["task/p0/0/0", "task/p0/0/0.1"]
    assert len(sample.turns) == 2
    assert sample.policy_tokens == 4
    assert_conserved(engine, committed=controller.committed)


async def test_each_kind_has_its_own_budget() -> None:
    tries = 0

    async def loop(rollout: Rollout) -> None:
        nonlocal tries
        tries += 1
        await rollout.generate()
        if tries == 1:
            raise ValueError("mine")
        if tries == 2:
            raise ToolError("the tool's")

    task = spec(loop=loop, group_size=1, failures=RETRY, epochs=1, prompts=prompts(1))
    async with Engine(ScriptedController(), task) as engine:
        batch = await engine.next_batch(1)
    assert len(batch) == 1
    assert engine.statistics().tasks["task"].failures == {"loop": 1, "tool": 1}


async def test_a_judger_that_failed_is_asked_again_about_the_same_answer() -> None:
    asked: list[Sample] = []

    async def judge(sample: Sample) -> float:
        asked.append(sample)
        if len(asked) == 1:
            raise ConnectionError("the reward service is busy")
        return 1.0

    controller = ScriptedController()
    task = spec(judger=judge, group_size=1, failures=RETRY, shuffle=False)
    async with Engine(controller, task) as engine:
        batch = await engine.next_batch(1)
    assert asked[0] is asked[1]
    assert len(controller.prompts) == 1
    assert batch.groups[0].rewards == (1.0,)
    figures = engine.statistics().tasks["task"]
    assert (figures.failures, figures.members_shrunk) == ({"judge": 1}, {})


async def test_a_judger_of_groups_is_asked_again_too() -> None:
    asked: list[int] = []

    class Flaky:
        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            asked.append(len(samples))
            if len(asked) == 1:
                raise ConnectionError("busy")
            return [1.0] * len(samples)

    task = spec(judger=Flaky(), failures=RETRY, epochs=1, prompts=prompts(1))
    async with Engine(ScriptedController(), task) as engine:
        batch = await engine.next_batch(1)
    assert asked == [2, 2]
    assert batch.groups[0].rewards == (1.0, 1.0)


async def test_retries_of_a_judger_have_an_end() -> None:
    asked = 0

    async def judge(sample: Sample) -> float:
        nonlocal asked
        asked += 1
        raise ConnectionError("down")

    policy = FailurePolicy(on_dead_member="retry", retries=2)
    task = spec(judger=judge, group_size=1, failures=policy, starve_after=1)
    async with Engine(ScriptedController(), task) as engine:
        with pytest.raises(Starved, match="down"):
            await engine.next_batch(1)
        assert asked == 3


async def test_a_prompt_that_can_not_be_used_is_not_tried_again() -> None:
    long = [Prompt("long", token_ids=[1] * 40)]
    controller = ScriptedController(max_context=40)
    task = spec(prompts=long, failures=RETRY, starve_after=1)
    async with Engine(controller, task) as engine:
        with pytest.raises(Starved, match="leaves no room"):
            await engine.next_batch(1)
        figures = engine.statistics().tasks["task"]
        assert figures.members_shrunk == {}
        assert figures.dropped == {"data": 1}


async def test_bug_051_shrinking_goes_on_without_the_dead() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.index == 1:
            raise ConnectionError("the sandbox is lost")

    async def judge(sample: Sample) -> float:
        return float(sample.index == 0)

    controller = ScriptedController(rate=10.0)
    task = spec(loop=loop, judger=judge, group_size=3, failures=SHRINK)
    async with Engine(controller, task) as engine:
        batch = await engine.next_batch(1)
    (group,) = batch.groups
    assert [s.index for s in group.samples] == [0, 2]
    assert group.rewards == (1.0, 0.0)
    figures = engine.statistics().tasks["task"]
    assert figures.members_shrunk == {"loop": 1}
    assert (figures.members, figures.members_delivered, figures.dropped) == (3, 2, {})
    assert_conserved(engine, committed=controller.committed)


async def test_bug_032_the_siblings_of_a_dead_member_finish_where_they_can_be_used() -> None:
    async def loop(rollout: Rollout) -> None:
        if rollout.index == 1:
            raise ValueError("x")
        await rollout.generate()

    controller, recording = ScriptedController(rate=10.0), RecordingInstrument()
    task = spec(loop=loop, group_size=4, failures=SHRINK)
    async with Engine(controller, task, instruments=[recording]) as engine:
        batch = await engine.next_batch(1)
    assert [s.status for s in batch.samples] == [Status.COMPLETED] * 3
    (dead,) = [s for s in recording.samples if s.status is Status.FAILED]
    assert dead.failure is not None
    assert "ValueError: x" in dead.failure.message
    assert "in loop" in dead.failure.traceback
    assert dead.uid.endswith("/1")


async def test_too_few_are_left_to_shrink() -> None:
    async def loop(rollout: Rollout) -> None:
        if rollout.index < 2:
            raise ValueError("no")
        await rollout.generate()

    for least, dropped in ((3, {"loop": 1}), (2, {}), (1, {})):
        policy = FailurePolicy(on_dead_member="shrink", min_members=least)
        task = spec(loop=loop, group_size=4, failures=policy, starve_after=1)
        controller = ScriptedController(rate=10.0)
        async with Engine(controller, task) as engine:
            if dropped:
                with pytest.raises(Starved):
                    await engine.next_batch(1)
            else:
                batch = await engine.next_batch(1)
                assert len(batch.groups[0]) == 2
            assert engine.statistics().tasks["task"].dropped == dropped
        assert_conserved(engine, committed=controller.committed)


async def test_a_judger_of_groups_judges_those_that_are_left() -> None:
    class Ranking:
        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            return [float(10 * len(samples) + s.index) for s in samples]

    task = spec(loop=failing(99), judger=Ranking(), group_size=3, failures=SHRINK)
    async with Engine(ScriptedController(), task) as engine:
        batch = await engine.next_batch(1)
    assert batch.groups[0].rewards == (20.0, 22.0)


async def test_retrying_and_then_shrinking() -> None:
    policy = FailurePolicy(on_dead_member="retry", retries=2, min_members=1)
    task = spec(loop=failing(99), failures=policy)
    async with Engine(ScriptedController(), task) as engine:
        batch = await engine.next_batch(1)
    assert [s.index for s in batch.samples] == [0]
    assert engine.statistics().tasks["task"].members_shrunk == {"retried": 2, "loop": 1}


async def test_bug_032_the_siblings_of_a_dead_member_finish() -> None:
    controller = ScriptedController(lambda _: Reply([5, 0], delay=100.0))

    async def loop(rollout: Rollout) -> None:
        if rollout.prompt.uid == "p0" and rollout.index == 1:
            raise ValueError("no")
        await rollout.generate()

    recording = RecordingInstrument()
    task = spec(loop=loop, group_size=3, shuffle=False, epochs=1, prompts=prompts(2))
    async with Engine(controller, task, instruments=[recording]) as engine:
        batch = await engine.next_batch(1)
        assert current_time() == pytest.approx(200.0)
    assert batch.groups[0].prompt.uid == "p1"
    dead = recording.groups[0][0]
    assert [s.status for s in dead.samples] == [
        Status.COMPLETED,
        Status.FAILED,
        Status.COMPLETED,
    ]
    figures = engine.statistics().tasks["task"]
    assert (figures.dropped, figures.members_dropped) == ({"loop": 1}, 3)
    assert_conserved(engine, committed=controller.committed)


async def test_bug_040_an_engine_in_which_everything_fails_stops_and_says_why() -> None:
    async def loop(rollout: Rollout) -> None:
        raise ValueError("the environment is gone")

    policy = FailurePolicy(max_failures_in_a_row=20)
    task = spec(loop=loop, failures=policy, starve_after=1000, shuffle=False)
    engine = Engine(ScriptedController(), task)
    with pytest.raises(EngineBroken) as caught:
        async with engine:
            await engine.next_batch(2)
    said = str(caught.value)
    assert "task 'task' had 20 failures in a row (20 loop), and no sample that completed" in said
    assert "sample task/p" in said
    assert "ValueError: the environment is gone" in said
    assert [type(cause) for cause in caught.value.causes] == [LoopError] * 3
    assert_conserved(engine)


async def test_the_causes_have_the_kinds_of_the_last_failures() -> None:
    kinds = [InferenceError("i"), ToolError("t"), LoopError("l")]

    async def loop(rollout: Rollout) -> None:
        if kinds:
            raise kinds.pop(0)
        await rollout.generate()

    async def judge(sample: Sample) -> float:
        raise ValueError("j")

    policy = FailurePolicy(max_failures_in_a_row=4)
    task = spec(loop=loop, judger=judge, group_size=1, failures=policy, starve_after=1000)
    with pytest.raises(EngineBroken, match="1 inference, 1 tool, 1 loop, 1 judge") as caught:
        async with Engine(ScriptedController(), task) as engine:
            await engine.next_batch(1)
    assert [type(c) for c in caught.value.causes] == [ToolError, LoopError, JudgeError]


async def test_a_sample_that_completes_ends_the_row_of_failures() -> None:
    count = 0

    async def loop(rollout: Rollout) -> None:
        nonlocal count
        count += 1
        if count % 5:
            raise ValueError("mostly")
        await rollout.generate()

    policy = FailurePolicy(max_failures_in_a_row=5)
    task = spec(loop=loop, group_size=1, failures=policy, starve_after=1000)
    async with Engine(ScriptedController(), task) as engine:
        for _ in range(10):
            await engine.next_batch(1)
    assert engine.statistics().tasks["task"].failures == {"loop": 40}


async def test_a_prompt_that_can_not_be_used_is_one_failure() -> None:
    mixed = [Prompt(f"p{i}", token_ids=[1] * 40) for i in range(9)]
    policy = FailurePolicy(max_failures_in_a_row=10)
    task = spec(prompts=mixed, group_size=8, failures=policy, epochs=1, starve_after=1000)
    async with Engine(ScriptedController(max_context=40), task) as engine:
        async for _ in engine.batches(1):
            raise AssertionError
    assert engine.statistics().tasks["task"].dropped == {"data": 9}


async def test_never_giving_up() -> None:
    async def loop(rollout: Rollout) -> None:
        raise ValueError("no")

    policy = FailurePolicy(max_failures_in_a_row=None)
    task = spec(loop=loop, group_size=1, failures=policy, starve_after=300)
    async with Engine(ScriptedController(), task) as engine:
        with pytest.raises(Starved):
            await engine.next_batch(1)


async def test_starved_names_the_member() -> None:
    async def loop(rollout: Rollout) -> None:
        raise ValueError("no")

    task = spec(loop=loop, starve_after=1, shuffle=False)
    async with Engine(ScriptedController(), task) as engine:
        with pytest.raises(Starved, match=r"the last one: task/p\d+/\d+/\d \(loop\): ValueError"):
            await engine.next_batch(1)


async def test_a_group_loop_sees_dead_members_and_may_replace_them() -> None:
    async def solve(group: LiveGroup) -> None:
        for sample in await group.each(group.run):
            if sample.status is Status.FAILED:
                await group.run(group.resample(group.rollouts[sample.index]))

    class Solve(GroupLoop):
        async def generate_sample(self, rollout: Rollout) -> None:
            await rollout.generate()
            if rollout.uid.endswith("/1"):
                raise ValueError("no")

    task = spec(loop=Solve(solve))
    async with Engine(ScriptedController(rate=10.0), task) as engine:
        batch = await engine.next_batch(1)
    assert len(batch.groups[0]) == 2
    assert engine.statistics().tasks["task"].members_shrunk == {"resampled": 1}


async def test_in_a_group_loop_the_policy_retries_and_shrinks_too() -> None:
    async def solve(group: LiveGroup) -> None:
        await group.each(group.run)

    class Solve(GroupLoop):
        async def generate_sample(self, rollout: Rollout) -> None:
            await rollout.generate()
            if rollout.index == 1:
                raise ValueError("no")

    policy = FailurePolicy(on_dead_member="retry", retries=1, min_members=1)
    async with Engine(ScriptedController(), spec(loop=Solve(solve), failures=policy)) as engine:
        batch = await engine.next_batch(1)
    assert [s.index for s in batch.samples] == [0]
    assert engine.statistics().tasks["task"].members_shrunk == {"retried": 1, "loop": 1}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"on_dead_member": "ignore"}, "on_dead_member"),
        ({"retries": -1}, "retries"),
        ({"retries": 1.5}, "retries"),
        ({"min_members": 0, "on_dead_member": "shrink"}, "min_members"),
        ({"min_members": 2}, "min_members is for"),
        ({"max_failures_in_a_row": 0}, "max_failures_in_a_row"),
    ],
)
async def test_bad_policies(options: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        FailurePolicy(**options)


async def test_a_group_can_not_be_smaller_than_it_has_to_be() -> None:
    policy = FailurePolicy(on_dead_member="shrink", min_members=3)
    with pytest.raises(ValueError, match="min_members must be <= group_size 2, got 3"):
        spec(failures=policy)
    with pytest.raises(TypeError, match="failures"):
        spec(failures="retry")


@pytest.mark.parametrize("policy", [RETRY, SHRINK], ids=["retry", "shrink"])
@each_way
def test_cancelled_at_every_step(
    backend: Literal["asyncio", "trio"], native: bool, policy: FailurePolicy
) -> None:
    def short(attempt: Attempt) -> Reply:
        return Reply([5, 6, 0], delay=0.1 * (1 + int(attempt.affinity[-1])))

    def make() -> tuple[Engine, ScriptedController]:
        controller = ScriptedController(short)
        task = spec(
            loop=failing(1),
            group_size=3,
            failures=policy,
            sampling=Sampling(3),
            prompts=prompts(3),
        )
        return Engine(controller, task), controller

    cancelled_at_every_step(make, lambda engine: engine.next_batch(2), backend, native)


def test_data_errors_are_of_their_own_kind() -> None:
    assert issubclass(DataError, Exception)
