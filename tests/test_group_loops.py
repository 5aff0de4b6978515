"""Loops that generate a whole group: what they may do, and what comes of it when they do something else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import anyio
import pytest
from anyio import create_task_group, current_time, move_on_after, sleep

from rollnest import (
    AgentLoop,
    AsyncStrategy,
    Batch,
    ComposedJudger,
    Engine,
    Group,
    LiveGroup,
    Rollout,
    Sample,
    Sampling,
    Status,
)
from rollnest.abc import Attempt
from rollnest.errors import HostLost, LoopError, Starved
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
)

from .helpers import cancelled_at_every_step, each_way, prompts, spec

pytestmark = pytest.mark.anyio


class GroupLoop(AgentLoop):
    """A group loop made of a function."""

    def __init__(self, solve: Callable[[LiveGroup], Awaitable[None]]) -> None:
        self.solve = solve

    async def generate_sample(self, rollout: Rollout) -> None:
        await rollout.generate()

    async def generate_group(self, group: LiveGroup) -> None:
        await self.solve(group)


async def by_length(sample: Sample) -> float:
    return float(sample.policy_tokens)


def says(**lengths: int) -> Callable[[Attempt], Reply]:
    """A server whose answers have these lengths, by the member's index; 1 is the length of others."""

    def script(attempt: Attempt) -> Reply:
        place = attempt.affinity.rsplit("/", 1)[1].replace(".", "_")
        return Reply([*range(1, lengths.get(f"m{place}", 1)), 0])

    return script


async def one(
    solve: Callable[[LiveGroup], Awaitable[None]],
    *,
    controller: ScriptedController | None = None,
    **options: Any,
) -> tuple[Group, Engine, RecordingInstrument]:
    """Runs one group by a group loop, to its delivery."""
    controller = controller or ScriptedController(rate=10.0)
    recording = RecordingInstrument()
    task = spec(loop=GroupLoop(solve), shuffle=False, **options)
    async with Engine(controller, task, instruments=[recording]) as engine:
        batch = await engine.next_batch(1)
        assert_conserved(engine, committed=controller.committed)
    assert_conserved(engine, committed=controller.committed)
    return batch.groups[0], engine, recording


async def failing(
    solve: Callable[[LiveGroup], Awaitable[None]], **options: Any
) -> tuple[Sequence[Sample], Engine]:
    """Runs one group by a group loop that is to be dropped."""
    controller = ScriptedController(rate=10.0, stop_every=10_000, stream=True)
    recording = RecordingInstrument()
    task = spec(loop=GroupLoop(solve), starve_after=1, shuffle=False, **options)
    async with Engine(controller, task, instruments=[recording]) as engine:
        with pytest.raises(Starved):
            await engine.next_batch(1)
        assert_conserved(engine, committed=controller.committed)
    return recording.groups[0][0].samples, engine


async def test_the_default_is_each_member_side_by_side() -> None:
    class Default(AgentLoop):
        async def generate_sample(self, rollout: Rollout) -> None:
            await rollout.generate()

        async def generate_group(self, group: LiveGroup) -> None:
            await super().generate_group(group)

    def script(_: Attempt) -> Reply:
        return Reply([5, 0], delay=1.0)

    async with Engine(ScriptedController(script), spec(loop=Default(), group_size=4)) as engine:
        batch = await engine.next_batch(1)
        assert current_time() == pytest.approx(1.0)
    assert [s.reward for s in batch.samples] == [0.0] * 4


async def test_members_one_after_the_other() -> None:
    seen: list[int] = []

    async def solve(group: LiveGroup) -> None:
        for rollout in group.rollouts:
            sample = await group.run(rollout)
            assert sample.verdict is not None
            seen.append(sample.index)
            assert [s.index for s in group.samples] == seen

    controller = ScriptedController(lambda _: Reply([5, 0], delay=1.0))
    group, _, recording = await one(solve, controller=controller, group_size=3)
    assert seen == [0, 1, 2]
    assert [s.generate_seconds for s in group.samples] == pytest.approx([1.0, 2.0, 3.0])
    assert len(recording.samples) == 3


async def test_a_shared_environment_in_which_the_members_move_in_turn() -> None:
    board: list[tuple[int, int]] = []

    async def solve(group: LiveGroup) -> None:
        board.clear()
        for _ in range(2):
            for rollout in group.rollouts:
                rollout.append([100 + len(board)])
                turn = await rollout.generate(max_tokens=2)
                board.append((rollout.index, turn.ids[0]))
        first, *_ = group.rollouts
        first.finish("won")

    group, engine, _ = await one(solve, group_size=2, judger=by_length)
    assert [index for index, _ in board] == [0, 1, 0, 1]
    assert [len(s.turns) for s in group.samples] == [2, 2]
    assert group.samples[0].finish_reason == "won"
    assert all(s.verdict is not None for s in group.samples)
    assert engine.statistics().tasks["task"].members_shrunk == {}


async def test_the_best_are_kept_and_the_rest_is_dropped() -> None:
    async def solve(group: LiveGroup) -> None:
        samples = await group.each(group.run)
        ranked = sorted(samples, key=lambda s: -(s.reward or 0.0))
        worst = {s.index for s in ranked[2:]}
        for rollout in group.rollouts:
            if rollout.index in worst:
                group.drop(rollout, "not among the best")

    controller = ScriptedController(says(m0=3, m1=9, m2=1, m3=7))
    group, engine, recording = await one(
        solve, controller=controller, group_size=4, judger=by_length
    )
    assert [s.index for s in group.samples] == [1, 3]
    assert group.rewards == (9.0, 7.0)
    figures = engine.statistics().tasks["task"]
    assert figures.members_shrunk == {"not among the best": 2}
    assert figures.members_delivered == 2
    assert len(recording.samples) == 4


async def test_a_bad_member_is_resampled() -> None:
    tries: list[str] = []

    async def solve(group: LiveGroup) -> None:
        for rollout in group.rollouts:
            tries.append(rollout.uid)
            while (await group.run(rollout)).reward == 1.0:
                rollout = group.resample(rollout)
                tries.append(rollout.uid)
                assert group.rollouts[rollout.index] is rollout

    controller = ScriptedController(says(m0=2, m1_2=5))
    group, engine, recording = await one(solve, controller=controller, judger=by_length)
    assert group.rewards == (2.0, 5.0)
    assert tries == ["task/p0/0/0", "task/p0/0/1", "task/p0/0/1.1", "task/p0/0/1.2"]
    figures = engine.statistics().tasks["task"]
    assert figures.members_shrunk == {"resampled": 2}
    assert (figures.members, figures.members_delivered) == (4, 2)
    assert len(recording.samples) == 4


async def test_derived_seeds_of_a_resampled_member_are_its_own() -> None:
    seeds: list[object] = []
    draws: list[float] = []

    def script(attempt: Attempt) -> Reply:
        seeds.append(attempt.sampling.seed)
        return Reply([5, 0])

    async def solve(group: LiveGroup) -> None:
        (rollout,) = group.rollouts
        for _ in range(3):
            draws.append(rollout.random.random())
            await group.run(rollout)
            rollout = group.resample(rollout)
        await group.run(rollout)

    controller = ScriptedController(script)
    await one(solve, controller=controller, group_size=1, sampling=Sampling(9, seed="derived"))
    assert len(set(seeds)) == 4
    assert len(set(draws)) == 3


async def test_the_groups_judger_is_asked_when_the_loop_asks_and_again_after_a_resampling() -> None:
    asked: list[list[int]] = []

    class Ranking:
        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            asked.append([s.policy_tokens for s in samples])
            order = sorted(samples, key=lambda s: s.policy_tokens)
            return [float(order.index(s)) for s in samples]

    async def solve(group: LiveGroup) -> None:
        assert [s.verdict for s in await group.each(group.run)] == [None, None]
        first, second = await group.judge()
        assert (first.reward, second.reward) == (1.0, 0.0)
        await group.run(group.resample(group.rollouts[1]))
        assert [s.reward for s in await group.judge()] == [0.0, 1.0]

    controller = ScriptedController(says(m0=4, m1=2, m1_1=6))
    group, _, recording = await one(solve, controller=controller, judger=Ranking())
    assert group.rewards == (0.0, 1.0)
    assert asked == [[4, 2], [4, 6], [4, 6]]
    assert len(recording.samples) == 3


async def test_what_a_judger_said_of_a_member_goes_with_it() -> None:
    class Shared:
        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            return [0.0] * len(samples)

    async def solve(group: LiveGroup) -> None:
        await group.each(group.run)
        await group.judge()
        await group.run(group.resample(group.rollouts[1]))

    judger = ComposedJudger({"length": by_length, "shared": Shared()})
    controller = ScriptedController(says(m0=4, m1=2, m1_1=6))
    group, _, _ = await one(solve, controller=controller, judger=judger)
    assert group.rewards == (4.0, 6.0)


async def test_judging_in_the_loop_ends_what_has_generated() -> None:
    async def solve(group: LiveGroup) -> None:
        for rollout in group.rollouts:
            await rollout.generate()
        samples = await group.judge()
        assert [s.reward for s in samples] == [3.0, 5.0]
        with pytest.raises(LoopError, match="has ended"):
            await group.rollouts[0].generate()
        with pytest.raises(LoopError, match="has ended: completed"):
            await group.run(group.rollouts[0])

    controller = ScriptedController(says(m0=3, m1=5))
    group, _, recording = await one(solve, controller=controller, judger=by_length)
    assert group.rewards == (3.0, 5.0)
    assert len(recording.samples) == 2


async def test_a_group_loop_that_raises_fails_who_has_not_ended() -> None:
    async def solve(group: LiveGroup) -> None:
        await group.run(group.rollouts[0])
        raise ValueError("the board is broken")

    samples, engine = await failing(solve, group_size=3)
    assert [s.status for s in samples] == [Status.COMPLETED, Status.FAILED, Status.FAILED]
    assert samples[1].failure is not None
    assert samples[1].failure.kind == "loop"
    assert "the board is broken" in samples[1].failure.message
    assert "in solve" in samples[1].failure.traceback
    assert engine.statistics().tasks["task"].failures["loop"] >= 2


async def test_an_error_out_of_each_has_its_kind() -> None:
    async def solve(group: LiveGroup) -> None:
        async def act(rollout: Rollout) -> None:
            await rollout.generate()

            def lift() -> None:
                raise OSError("no crane")

            await rollout.tool(lift)

        await group.each(act)

    samples, _ = await failing(solve)
    assert {s.failure.kind for s in samples if s.failure} == {"tool"}


async def test_members_that_were_never_run_fail() -> None:
    async def solve(group: LiveGroup) -> None:
        await group.run(group.rollouts[0])

    samples, _ = await failing(solve)
    assert [s.status for s in samples] == [Status.COMPLETED, Status.FAILED]
    assert samples[1].failure is not None
    assert "had it generate nothing" in samples[1].failure.message


async def test_a_member_runs_once() -> None:
    errors: list[str] = []

    async def solve(group: LiveGroup) -> None:
        first, second = group.rollouts

        async def run() -> None:
            await group.run(first)

        async with create_task_group() as tasks:
            tasks.start_soon(run)
            await sleep(0.01)
            for action in (group.run, _async(group.resample)):
                with pytest.raises(LoopError) as caught:
                    await action(first)
                errors.append(str(caught.value))
            with pytest.raises(LoopError) as caught:
                await group.judge()
            errors.append(str(caught.value))
        with pytest.raises(LoopError) as caught:
            await group.run(first)
        errors.append(str(caught.value))
        await group.run(second)

    await one(solve)
    uid = "task/p0/0/0"
    assert errors == [
        f"run() on rollout {uid}, which runs already",
        f"resample() on rollout {uid}, which runs",
        f"judge() while rollout {uid} runs",
        f"run() on rollout {uid}, which has ended: completed",
    ]


def _async(function: Callable[[Rollout], object]) -> Callable[[Rollout], Awaitable[object]]:
    async def call(rollout: Rollout) -> object:
        return function(rollout)

    return call


async def test_foreign_members_and_closed_groups_are_refused() -> None:
    groups: list[LiveGroup] = []
    strangers: list[Rollout] = []
    refused: list[str] = []

    async def solve(group: LiveGroup) -> None:
        rollout = group.rollouts[0]
        if groups:
            for action in (groups[0].drop, groups[0].resample, group.drop, group.resample):
                with pytest.raises(LoopError) as caught:
                    action(strangers[0])
                refused.append(str(caught.value))
            for act in (groups[0].judge(), groups[0].each(group.run), group.run(strangers[0])):
                with pytest.raises(LoopError):
                    await act
        groups.append(group)
        strangers.append(rollout)
        await group.each(group.run)

    controller = ScriptedController()
    task = spec(loop=GroupLoop(solve), group_size=1, shuffle=False)
    async with Engine(controller, task) as engine:
        await engine.next_batch(1)
        await engine.next_batch(1)
    assert len(refused) == 4
    assert "whose loop has returned" in refused[0]
    assert "which is no member of <LiveGroup of prompt 'p1' visit 1: 1 members>" in refused[2]


async def test_dropping_a_running_member_cancels_it() -> None:
    async def solve(group: LiveGroup) -> None:
        first, second, third = group.rollouts
        ended: list[Sample] = []

        async def run(rollout: Rollout) -> None:
            ended.append(await group.run(rollout))
            if len(ended) == 2:
                group.drop(third, "too slow")
                with pytest.raises(LoopError, match="no member"):
                    group.drop(third)

        async with create_task_group() as tasks:
            for rollout in (first, second, third):
                tasks.start_soon(run, rollout)
        assert [s.status for s in ended] == [Status.COMPLETED, Status.COMPLETED, Status.ABORTED]
        assert len(group.rollouts) == 2

    def script(attempt: Attempt) -> Reply:
        return Reply([5, 0], delay=100.0 if attempt.affinity.endswith("/2") else 1.0)

    controller = ScriptedController(script)
    group, engine, recording = await one(solve, controller=controller, group_size=3)
    assert len(group) == 2
    assert engine.statistics().tasks["task"].members_shrunk == {"too slow": 1}
    assert len(recording.samples) == 3
    assert not controller.open


async def test_the_last_member_stays() -> None:
    async def solve(group: LiveGroup) -> None:
        first, second = group.rollouts
        group.drop(first)
        with pytest.raises(LoopError, match="the last member"):
            group.drop(second)
        await group.run(second)

    group, engine, _ = await one(solve)
    assert [s.index for s in group.samples] == [1]
    assert engine.statistics().tasks["task"].members_shrunk == {"dropped": 1}


async def test_a_run_that_the_loop_cancels_is_never_trained() -> None:
    async def solve(group: LiveGroup) -> None:
        first, second = group.rollouts
        with move_on_after(0.35):
            await group.run(first)
        assert first.turns
        with pytest.raises(LoopError, match="was run and cancelled"):
            await group.run(first)
        await group.run(second)

    samples, engine = await failing(solve)
    assert [s.status for s in samples] == [Status.FAILED, Status.COMPLETED]
    assert samples[0].failure is not None
    assert "cancelled its run()" in samples[0].failure.message
    assert engine.statistics().tasks["task"].dropped["loop"] >= 1


async def test_a_cancelled_run_may_be_resampled() -> None:
    async def solve(group: LiveGroup) -> None:
        first, second = group.rollouts
        with move_on_after(0.35):
            await group.run(first)
        await group.run(group.resample(first))
        await group.run(second)

    controller = ScriptedController(rate=10.0, stop_every=10_000, stream=True)
    group, engine, _ = await one(solve, controller=controller)
    assert group.status is Status.COMPLETED
    assert engine.statistics().tasks["task"].members_shrunk == {"resampled": 1}


async def test_a_group_loop_that_cancels_itself_fails(anyio_backend: tuple[str, Any]) -> None:
    async def solve(group: LiveGroup) -> None:
        await group.run(group.rollouts[0])
        if anyio_backend[0] == "asyncio":
            raise anyio.get_cancelled_exc_class()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await sleep(1)
        raise ValueError("trio makes no cancellations by hand")

    samples, _ = await failing(solve)
    assert [s.status for s in samples] == [Status.COMPLETED, Status.FAILED]


async def test_resampling_has_an_end() -> None:
    async def solve(group: LiveGroup) -> None:
        (rollout,) = group.rollouts
        while True:
            rollout = group.resample(rollout)

    samples, engine = await failing(solve, group_size=1)
    assert samples[0].failure is not None
    assert "was resampled 16 times; that is the most" in samples[0].failure.message
    assert engine.statistics().tasks["task"].members_shrunk["resampled"] == 16


async def test_reasons_are_counted_up_to_a_bound() -> None:
    count = 0

    async def solve(group: LiveGroup) -> None:
        nonlocal count
        count += 1
        group.drop(group.rollouts[0], f"reason {count}")
        await group.run(group.rollouts[0])

    task = spec(loop=GroupLoop(solve))
    async with Engine(ScriptedController(), task) as engine:
        await engine.next_batch(100)
        shrunk = engine.statistics().tasks["task"].members_shrunk
    assert (len(shrunk), shrunk["other"]) == (65, 36)


async def test_an_expired_group_restarts_whole() -> None:
    runs: list[str] = []

    async def solve(group: LiveGroup) -> None:
        runs.append(f"{group.prompt.uid}: {len(group.rollouts)}")
        await group.each(group.run)

    controller = ScriptedController(lambda a: Reply([5, 0], delay=1.0))
    strategy = AsyncStrategy(max_staleness=0, lead=1)
    task = spec(loop=GroupLoop(solve), shuffle=False, strategy=strategy)
    async with Engine(controller, task, batch_size=1) as engine:
        await sleep(1.5)
        async with engine.paused() as pause:
            await pause.update_weights({})
        batch = await engine.next_batch()
        uid = batch.groups[0].prompt.uid
        assert uid in ("p0", "p1")  # those that expired, before any fresh one
        assert_conserved(engine, committed=controller.committed)
    assert runs.count(f"{uid}: 2") == 2
    assert engine.statistics().tasks["task"].members_shrunk == {"expired": 4}


async def test_a_pause_is_not_seen_by_a_group_loop() -> None:
    times: list[float] = []

    async def solve(group: LiveGroup) -> None:
        times.append(current_time())
        await group.each(group.run)

    controller = ScriptedController(rate=10.0, stop_every=10_000)
    task = spec(loop=GroupLoop(solve))
    batches: list[Batch] = []
    async with Engine(controller, task) as engine, create_task_group() as tasks:

        async def take() -> None:
            batches.append(await engine.next_batch(1))

        tasks.start_soon(take)
        await sleep(1)
        async with engine.paused():
            await sleep(10)
        await sleep(5)
    assert len(times) == 1
    assert [t.attempts for s in batches[0].samples for t in s.turns] == [2, 2]


@pytest.mark.parametrize("replayable", [False, True])
async def test_an_evaluation_has_all_members_again_whose_loop_was_lost(replayable: bool) -> None:
    seen: list[int] = []

    async def solve(group: LiveGroup) -> None:
        seen.append(len(group.rollouts))
        for rollout in group.rollouts:
            await group.run(rollout)
        if len(seen) == 1:
            raise HostLost("the arena is gone")

    loop = GroupLoop(solve)
    loop.replayable = replayable
    controller = ScriptedController()
    async with Engine(controller, spec(loop=loop, prompts=prompts(1), group_size=3)) as engine:
        result = await engine.evaluate("task")
        assert_conserved(engine)
    assert seen == [3, 3]
    assert [sample.status for sample in result.samples] == [Status.COMPLETED] * 3
    assert len(controller.prompts) == (3 if replayable else 6)


@pytest.mark.parametrize("losses", [1, 3, 4])
async def test_a_group_loop_that_loses_what_runs_it_begins_anew(losses: int) -> None:
    """As a loop of one sample does; the fourth time it fails."""
    uids: list[str] = []

    async def solve(group: LiveGroup) -> None:
        uids.append(group.prompt.uid)
        await group.run(group.rollouts[0])
        if uids.count("p0") <= losses and group.prompt.uid == "p0":
            raise HostLost("the arena is gone")
        await group.run(group.rollouts[1])

    controller = ScriptedController()
    group, engine, _ = await one(solve, controller=controller)
    figures = engine.statistics().tasks["task"]
    if losses < 4:
        assert group.prompt.uid == "p0"
        assert figures.redrawn == losses
        assert figures.members_shrunk == {"restarted": losses, "aborted": losses}
    else:
        assert group.prompt.uid == "p1"
        assert figures.dropped == {"loop": 1}
        assert uids.count("p0") == 4


async def test_redundancy_and_a_group_loop_exclude_each_other() -> None:
    async def solve(group: LiveGroup) -> None: ...

    with pytest.raises(ValueError, match="redundancy must be 0 for a loop that overrides"):
        spec(loop=GroupLoop(solve), redundancy=1)


@each_way
def test_cancelled_at_every_step(backend: Literal["asyncio", "trio"], native: bool) -> None:
    async def solve(group: LiveGroup) -> None:
        first, second, third = group.rollouts
        await group.run(first)
        third = group.resample(third)
        await second.generate(max_tokens=1)
        await group.run(third)
        group.drop(third)
        await group.judge()

    def make() -> tuple[Engine, ScriptedController]:
        controller = ScriptedController(rate=10.0)
        loop = GroupLoop(solve)
        task = spec(loop=loop, group_size=3, sampling=Sampling(3), prompts=prompts(3))
        return Engine(controller, task), controller

    cancelled_at_every_step(make, lambda engine: engine.next_batch(2), backend, native)
