"""Group loops that can be replayed: a group that was cut goes on, its loop given what its rollouts had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from anyio import create_task_group, sleep, sleep_until
from attrs import define, field

from rollnest import (
    AgentLoop,
    Batch,
    Engine,
    FailurePolicy,
    Group,
    LiveGroup,
    PauseMode,
    Rollout,
    Sample,
    Sampling,
    Status,
    SyncStrategy,
    inspect_checkpoint,
)
from rollnest.errors import EndOfPrompts
from rollnest.testing import (
    RecordingInstrument,
    ScriptedController,
    assert_conserved,
    check_loop,
    check_sample,
)

from .helpers import cancelled_at_every_step, each_way, prompts, spec

pytestmark = pytest.mark.anyio


@define
class World:
    """What is outside of the engine: tools and judgers, each counting who called it."""

    tools: Counter[str] = field(factory=Counter[str])
    judged: Counter[str] = field(factory=Counter[str])
    ranked: int = 0

    async def look_up(self, what: str) -> int:
        """A tool that takes a second."""
        await sleep(1)
        self.tools[what] += 1
        return 500 + len(what)

    async def length(self, sample: Sample) -> float:
        """Judges one sample; takes a quarter of a second."""
        await sleep(0.25)
        self.judged[str(sample.segments[0].ids.tolist())] += 1
        return float(sum(sample.segments[0].ids) % 7)


class Loop(AgentLoop):
    """Two turns, and a tool between them."""

    replayable = True

    def __init__(self, world: World) -> None:
        self.world = world

    async def generate_sample(self, rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([await rollout.tool(self.world.look_up, rollout.uid)])
        await rollout.generate()


class SideBySide(Loop):
    async def generate_group(self, group: LiveGroup) -> None:
        await group.each(group.run)


class InTurn(Loop):
    """Each member is told of the best before it."""

    async def generate_group(self, group: LiveGroup) -> None:
        for rollout in group.rollouts:
            best = max((sample.reward or 0.0 for sample in group.samples), default=0.0)
            rollout.append([int(best) + 2])
            await group.run(rollout)


class Board(Loop):
    """One environment in which all move in turn; nobody is run."""

    async def generate_group(self, group: LiveGroup) -> None:
        board: list[int] = []
        for move in range(2):
            for rollout in group.rollouts:
                rollout.append(board[-3:] or [1])
                turn = await rollout.generate(max_tokens=1 + move)
                board += turn.ids.tolist()
                board.append(await rollout.tool(self.world.look_up, f"{rollout.uid} {move}"))
        group.rollouts[0].finish("won")


class Resampled(Loop):
    """Members are drawn again until they are good, or were drawn three times."""

    async def generate_group(self, group: LiveGroup) -> None:
        await group.each(self.insist, group)

    async def insist(self, rollout: Rollout, group: LiveGroup) -> None:
        for _ in range(3):
            if ((await group.run(rollout)).reward or 0.0) >= 4.0:
                return
            rollout = group.resample(rollout)
        await group.run(rollout)


class Filtered(Loop):
    """Who is not among the best two leaves."""

    async def generate_group(self, group: LiveGroup) -> None:
        samples = await group.each(group.run)
        ranked = sorted(samples, key=lambda s: (-(s.reward or 0.0), s.index))
        for sample in ranked[2:]:
            rollout = next(r for r in group.rollouts if r.index == sample.index)
            group.drop(rollout, "not among the best")
        await sleep(0.5)  # everybody has ended, and the loop has not


class Mixed(Loop):
    """All of it: own turns, draws, a member that is let go before it has done anything, one resampled."""

    async def generate_group(self, group: LiveGroup) -> None:
        first, second, third = group.rollouts
        group.drop(third, "not needed")
        first.append([first.random.randrange(50)])
        await first.generate(max_tokens=1)
        sample = await group.run(second)
        fresh = group.resample(second)
        fresh.append([int(sample.reward or 0.0)])
        await group.run(fresh)
        await group.judge()


class Ranking:
    """Judges whole groups; takes half a second."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
        """Ranks them."""
        await sleep(0.5)
        self.world.ranked += 1
        return [float(sum(s.segments[0].ids) % 11) for s in samples]


class Ranked(Loop):
    """The worst is drawn again once, and the group judged again."""

    async def generate_group(self, group: LiveGroup) -> None:
        await group.each(group.run)
        samples = await group.judge()
        worst = min(samples, key=lambda s: (s.reward or 0.0, s.index)).index
        await group.run(group.resample(group.rollouts[worst]))
        await sleep(0.5)
        await group.judge()


LOOPS: list[type[Loop]] = [SideBySide, InTurn, Board, Resampled, Filtered, Mixed, Ranked]
each_loop = pytest.mark.parametrize("kind", LOOPS)


def server(**options: Any) -> ScriptedController:
    """A token takes a second, and comes when it is made."""
    return ScriptedController(rate=1.0, stream=True, stop_every=10_000, **options)


def task_of(loop: Loop, **options: Any) -> Any:
    judger: Any = Ranking(loop.world) if isinstance(loop, Ranked) else loop.world.length
    defaults: dict[str, Any] = {
        "group_size": 3,
        "sampling": Sampling(2),
        "judger": judger,
        "shuffle": False,
        "epochs": 1,
        "prompts": prompts(1),
        "strategy": SyncStrategy(max_staleness=10**6),
    }
    return spec(loop=loop, **(defaults | options))


def content(group: Group) -> Any:
    return [
        (
            s.index,
            s.status,
            s.reward,
            s.finish_reason,
            [(c.prompt_ids.tolist(), c.ids.tolist(), c.mask.tolist()) for c in s.segments],
            [(t.start, t.stop, t.finish_reason) for t in s.turns],
        )
        for s in group.samples
    ]


@define
class Outcome:
    """What came of a run."""

    groups: list[Any]
    shrunk: dict[str, int]
    members: int
    samples: Counter[tuple[str, str]]
    failures: dict[str, int]
    world: World


async def until_the_end(engine: Engine, batches: list[Batch]) -> None:
    while True:
        try:
            batches.append(await engine.next_batch(1, wait_in_pause=True))
        except EndOfPrompts:
            return
        engine.commit(batches[-1])


def outcome(
    loop: Loop, engine: Engine, batches: list[Batch], heard: RecordingInstrument
) -> Outcome:
    figures = engine.statistics().tasks["task"]
    for batch in batches:
        for sample in batch.samples:
            check_sample(sample)
    assert figures.diverged == 0
    assert figures.restarted == 0
    assert figures.tokens_discarded == 0
    return Outcome(
        [content(group) for batch in batches for group in batch.groups],
        dict(figures.members_shrunk),
        figures.members,
        Counter((s.uid, s.status.value) for s in heard.samples),
        {kind: n for kind, n in figures.failures.items() if n},
        loop.world,
    )


async def evicted(loop: Loop, *times: float, **options: Any) -> Outcome:
    """Runs a task to its end, evicted at these times."""
    controller, heard, batches = server(), RecordingInstrument(), list[Batch]()
    engine = Engine(controller, task_of(loop, **options), instruments=[heard])
    async with engine, create_task_group() as group:
        group.start_soon(until_the_end, engine, batches)
        began = anyio.current_time()
        for at in times:
            await sleep_until(began + at)
            async with engine.paused(PauseMode.EVICT):
                assert engine.statistics().total("flight") == 0
                assert_conserved(engine, committed=controller.committed)
    assert_conserved(engine, committed=controller.committed)
    return outcome(loop, engine, batches, heard)


async def restored(loop: Loop, *times: float, **options: Any) -> Outcome:
    """Runs a task to its end; at these times it goes on in another engine. Each engine has a time of its own."""
    told = RecordingInstrument()
    batches: list[Batch] = []
    state: Any = None
    committed = 0
    for at in [*times, None]:
        controller = server()
        heard = RecordingInstrument()
        engine = Engine(controller, task_of(loop, **options), instruments=[heard])
        if state is not None:
            engine.load_state_dict(state)
        began = anyio.current_time()
        async with engine, create_task_group() as group:
            group.start_soon(until_the_end, engine, batches)
            if at is not None:
                await sleep_until(began + at)
                state = engine.state_dict()
                assert_conserved(engine, committed=committed + controller.committed)
                committed += controller.committed
                told.samples += heard.samples
                group.cancel_scope.cancel()
    assert_conserved(engine, committed=committed + controller.committed)
    told.samples += heard.samples
    return outcome(loop, engine, batches, told)


async def seconds_of(kind: type[Loop], **options: Any) -> tuple[Outcome, float]:
    """A run that nobody cuts, and how long it takes."""
    began = anyio.current_time()
    whole = await evicted(kind(World()), **options)
    assert set(whole.world.tools.values()) == {1}
    return whole, anyio.current_time() - began


@each_loop
async def test_an_evicted_group_goes_on_as_if_nothing_had_happened(kind: type[Loop]) -> None:
    whole, seconds = await seconds_of(kind)
    for cut in range(int(seconds / 0.7)):
        at = 0.13 + 0.7 * cut
        assert await evicted(kind(World()), at) == whole, at


@each_loop
async def test_a_group_that_is_evicted_again_and_again_goes_on(kind: type[Loop]) -> None:
    whole, seconds = await seconds_of(kind)
    for between in (0.37, 0.83, 2.3):
        times = [between * (1 + n) for n in range(int(2 * seconds / between))]
        assert await evicted(kind(World()), *times) == whole, between


@each_loop
async def test_a_restored_group_goes_on_as_if_nothing_had_happened(kind: type[Loop]) -> None:
    whole, seconds = await seconds_of(kind)
    for cut in range(int(seconds / 2.1)):
        at = 0.13 + 2.1 * cut
        assert await restored(kind(World()), at, 0.0, 0.4, 1.7) == whole, at
    for at in (1.3, int(seconds / 2) + 0.07, seconds - 0.6):
        assert await restored(kind(World()), at) == whole, at


@pytest.mark.parametrize("kind", [InTurn, Board, Mixed])
async def test_turns_that_ended_are_not_asked_for_again(kind: type[Loop]) -> None:
    whole, seconds = await seconds_of(kind)
    loop = kind(World())
    controller, batches = server(), list[Batch]()
    async with Engine(controller, task_of(loop)) as engine, create_task_group() as group:
        group.start_soon(until_the_end, engine, batches)
        await sleep(seconds - 0.6)
        asked, committed = len(controller.prompts), controller.committed
        async with engine.paused(PauseMode.EVICT):
            pass
    figures = engine.statistics().tasks["task"]
    assert [content(group) for batch in batches for group in batch.groups] == whole.groups
    assert len(controller.prompts) <= asked + 1
    assert controller.committed <= committed + 1
    assert figures.replayed_turns >= asked - 1
    assert figures.redrawn == 1


# What its loop does otherwise


class Fickle(Loop):
    """Does something else in each of its lives."""

    def __init__(self, world: World, *plans: Callable[[LiveGroup, Fickle], Awaitable[None]]):
        super().__init__(world)
        self.plans = plans
        self.lives = 0

    async def generate_group(self, group: LiveGroup) -> None:
        plan = self.plans[min(self.lives, len(self.plans) - 1)]
        self.lives += 1
        await plan(group, self)


async def evicted_at(loop: Loop, *times: float, **options: Any) -> tuple[Group, Any]:
    """Like `evicted`, for loops that diverge: returns the first group and the task's figures."""
    controller, batches = server(), list[Batch]()
    engine = Engine(controller, task_of(loop, **options))
    began = anyio.current_time()
    async with engine, create_task_group() as group:
        group.start_soon(until_the_end, engine, batches)
        for at in times:
            await sleep_until(began + at)
            async with engine.paused(PauseMode.EVICT):
                assert_conserved(engine, committed=controller.committed)
    assert_conserved(engine, committed=controller.committed)
    for sample in batches[0].samples:
        check_sample(sample)
    return batches[0].groups[0], engine.statistics().tasks["task"]


async def test_a_member_that_is_told_something_else_diverges_alone() -> None:
    async def plan(group: LiveGroup, loop: Fickle) -> None:
        first, second, third = group.rollouts
        second.append([40 + loop.lives])
        for rollout in (first, second, third):
            await group.run(rollout)

    loop = Fickle(World(), plan)
    group, figures = await evicted_at(loop, 13.0)  # in the third one
    assert [s.segments[0].ids[0] for s in group.samples][1] == 42
    assert (figures.diverged, figures.tokens_discarded) == (1, 4)
    assert loop.world.tools == {"task/p0/0/0": 1, "task/p0/0/1": 2, "task/p0/0/2": 1}
    assert sorted(loop.world.judged.values()) == [1, 1, 1, 1]  # what diverged is judged again


async def test_members_that_a_loop_does_not_come_by_again_are_let_go() -> None:
    async def resamples(group: LiveGroup, loop: Fickle) -> None:
        await group.run(group.rollouts[0])
        await group.run(group.resample(group.rollouts[0]))
        await group.each(group.run)

    async def keeps(group: LiveGroup, loop: Fickle) -> None:
        for rollout in group.rollouts:
            await group.run(rollout)

    loop = Fickle(World(), resamples, keeps)
    group, figures = await evicted_at(loop, 12.0)
    assert [s.status for s in group.samples] == [Status.COMPLETED] * 3
    assert figures.members_shrunk == {"diverged": 1}
    assert (figures.members, figures.diverged) == (4, 1)
    # Who was resampled is a member again, with what it had.
    assert loop.world.tools["task/p0/0/0"] == 1


async def test_a_loop_that_resamples_only_when_it_runs_again() -> None:
    async def keeps(group: LiveGroup, loop: Fickle) -> None:
        for rollout in group.rollouts:
            await group.run(rollout)

    async def resamples(group: LiveGroup, loop: Fickle) -> None:
        first, second, third = group.rollouts
        await group.run(first)
        group.drop(second, "late")
        await group.run(group.resample(first))
        await group.run(third)

    loop = Fickle(World(), keeps, resamples)
    group, figures = await evicted_at(loop, 12.0)
    assert [s.index for s in group.samples] == [0, 2]
    assert figures.members_shrunk == {"resampled": 1, "late": 1}
    assert figures.members == 4


async def test_a_judger_of_groups_is_asked_again_where_the_members_differ() -> None:
    async def plan(group: LiveGroup, loop: Fickle) -> None:
        group.rollouts[0].append([40 + loop.lives])
        await group.each(group.run)
        await group.judge()
        await sleep(5)

    loop = Fickle(World(), plan)
    group, _ = await evicted_at(loop, 7.0, judger=Ranking(loop.world))
    assert loop.world.ranked == 3  # in the first life; in the second, and when it had returned
    assert all(s.reward is not None for s in group.samples)


# Environments, failures, limits, versions


@pytest.mark.parametrize("drifts", [False, True])
async def test_an_environment_in_this_process_is_made_again(drifts: bool) -> None:
    boards: list[list[int]] = []

    class Shared(Loop):
        async def generate_group(self, group: LiveGroup) -> None:
            board: list[int] = [7] if drifts and len(boards) == 1 else []
            boards.append(board)

            async def move(token: int) -> list[int]:
                board.append(token)
                return board[-2:]

            for _ in range(2):
                for rollout in group.rollouts:
                    turn = await rollout.generate()
                    rollout.append(await rollout.tool(move, turn.ids[0], replay="rerun"))

    controller, batches = server(), list[Batch]()
    task = task_of(Shared(World()))
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(until_the_end, engine, batches)
        await sleep(9.0)
        async with engine.paused(PauseMode.EVICT):
            pass
    assert_conserved(engine, committed=controller.committed)
    figures = engine.statistics().tasks["task"]
    assert [len(s.turns) for s in batches[0].samples] == [2, 2, 2]
    if drifts:
        assert [len(board) for board in boards] == [4, 2, 6]
        assert (figures.restarted, figures.members_shrunk) == (3, {"restarted": 3})
    else:
        assert [len(board) for board in boards] == [4, 6]
        assert (figures.restarted, figures.members_shrunk) == (0, {})


async def test_a_member_that_failed_and_was_tried_again_is_not_tried_once_more() -> None:
    tries: list[str] = []

    class Failing(Loop):
        async def generate_sample(self, rollout: Rollout) -> None:
            tries.append(rollout.uid)
            await rollout.generate()
            if rollout.uid.endswith("/1"):
                raise ValueError("bad luck")
            await rollout.generate()

        async def generate_group(self, group: LiveGroup) -> None:
            for rollout in group.rollouts:
                await group.run(rollout)

    failures = FailurePolicy(on_dead_member="retry", retries=1)
    whole = await evicted(Failing(World()), failures=failures)
    assert tries == ["task/p0/0/0", "task/p0/0/1", "task/p0/0/1.1", "task/p0/0/2"]
    tries.clear()
    again = await evicted(Failing(World()), 9.5, failures=failures)
    assert again == whole
    assert again.failures == {"loop": 1}
    assert again.shrunk == {"retried": 1}
    # The one that failed isn't run again.
    assert tries == [
        *("task/p0/0/0", "task/p0/0/1", "task/p0/0/1.1"),
        *("task/p0/0/0", "task/p0/0/1.1", "task/p0/0/2"),
    ]
    tries.clear()
    assert await restored(Failing(World()), 9.5, failures=failures) == whole


async def test_a_judger_that_failed_is_not_asked_again() -> None:
    asked: list[int] = []

    async def judge(sample: Sample) -> float:
        asked.append(sample.index)
        if sample.index == 0:
            raise ValueError("no idea")
        return 1.0

    class Lenient(InTurn):
        pass

    options: dict[str, Any] = {
        "judger": judge,
        "failures": FailurePolicy(on_dead_member="shrink", min_members=2),
    }
    whole = await evicted(Lenient(World()), **options)
    once = asked.copy()
    asked.clear()
    assert await evicted(Lenient(World()), 8.0, **options) == whole
    assert asked == once
    assert whole.shrunk == {"judge": 1}


async def test_a_member_that_is_too_old_has_its_group_begin_anew_as_a_whole() -> None:
    loop = InTurn(World())
    controller, batches = server(), list[Batch]()
    task = task_of(loop, strategy=SyncStrategy(max_staleness=1))
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(until_the_end, engine, batches)
        await sleep(12.0)
        async with engine.paused(PauseMode.EVICT) as pause:
            await pause.update_weights({}, 1)
        await sleep(0.5)
        assert loop.world.tools["task/p0/0/0"] == 1
        async with engine.paused(PauseMode.EVICT) as pause:
            await pause.update_weights({}, 2)
    assert_conserved(engine, committed=controller.committed)
    assert {s.oldest_version for s in batches[0].samples} == {2}
    assert loop.world.tools["task/p0/0/0"] == 2


async def test_a_checkpoint_of_one_on_the_disk(tmp_path: Path) -> None:
    whole, _ = await seconds_of(Resampled)
    loop = Resampled(World())
    controller, batches = server(), list[Batch]()
    async with Engine(controller, task_of(loop)) as engine, create_task_group() as group:
        group.start_soon(until_the_end, engine, batches)
        await sleep(8.0)
        await engine.save(tmp_path)
        group.cancel_scope.cancel()
    found = inspect_checkpoint(tmp_path).tasks["task"]
    assert found.places == {"flight": 1}
    assert found.journals >= 4  # who was let go has one too
    assert found.turns >= 6
    engine = Engine.restore(tmp_path, server(), task_of(loop))
    async with engine:
        await until_the_end(engine, batches)
    assert [content(group) for batch in batches for group in batch.groups] == whole.groups
    assert set(loop.world.tools.values()) == {1}
    assert_conserved(engine)


async def test_what_newer_weights_made_is_let_go_as_a_whole() -> None:
    loop = Resampled(World())
    async with Engine(server(), task_of(loop)) as engine, create_task_group() as group:
        group.start_soon(until_the_end, engine, [])
        await sleep(3.0)
        async with engine.paused() as pause:
            await pause.update_weights({}, 1)
        await sleep(6.0)
        state = engine.state_dict()
        members = engine.statistics().tasks["task"].members
        group.cancel_scope.cancel()
    assert members > 3
    batches: list[Batch] = []
    engine = Engine(server(), task_of(loop))
    engine.load_state_dict(state, version=0)
    assert engine.restored is not None
    assert engine.restored.newer == 1
    async with engine:
        await until_the_end(engine, batches)
    figures = engine.statistics().tasks["task"]
    left = figures.members_shrunk
    assert left["newer weights"] == 3
    assert sum(left.values()) == figures.members - 3
    assert {s.oldest_version for s in batches[0].samples} == {0}
    assert_conserved(engine)


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
async def test_whether_a_loop_is_replayable_may_change(before: bool, after: bool) -> None:
    class Changing(InTurn):
        replayable = before

    loop = Changing(World())
    async with Engine(server(), task_of(loop)) as engine, create_task_group() as group:
        group.start_soon(until_the_end, engine, [])
        await sleep(9.0)
        state = engine.state_dict()
        group.cancel_scope.cancel()
    Changing.replayable = after
    engine = Engine(server(), task_of(loop))
    engine.load_state_dict(state)
    batches: list[Batch] = []
    async with engine:
        await until_the_end(engine, batches)
    assert_conserved(engine)
    assert engine.statistics().tasks["task"].replayed_turns == 0
    assert loop.world.tools["task/p0/0/0"] == 2


@pytest.mark.parametrize("replayable", [False, True])
async def test_a_group_whose_members_have_ended_and_whose_loop_has_not_is_evicted(
    replayable: bool,
) -> None:
    slept: list[float] = []

    class Slow(SideBySide):
        async def generate_group(self, group: LiveGroup) -> None:
            await super().generate_group(group)
            slept.append(anyio.current_time())
            if len(slept) == 1:
                await sleep(10_000)

    Slow.replayable = replayable
    loop = Slow(World())
    controller, batches = server(), list[Batch]()
    async with Engine(controller, task_of(loop)) as engine, create_task_group() as group:
        group.start_soon(until_the_end, engine, batches)
        await sleep(20.0)
        async with engine.paused(PauseMode.EVICT):
            assert engine.statistics().total("flight") == 0
            assert engine.statistics().total("ready") == 0
    assert len(batches[0].groups[0]) == 3
    assert set(loop.world.tools.values()) == {1 if replayable else 2}
    assert_conserved(engine, committed=controller.committed)


def test_replayable_must_be_a_bool() -> None:
    loop = InTurn(World())
    loop.replayable = "yes"  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"loop\.replayable must be a bool, got 'yes'"):
        task_of(loop)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOOPS)
def test_check_loop_of_a_replayable_group_loop(kind: type[Loop]) -> None:
    world = World()
    loop = kind(world)
    judger: Any = Ranking(world) if kind is Ranked else world.length
    report = check_loop(loop, judger=judger, group_size=3, sampling=Sampling(2), every=5)
    assert report.evicted
    assert report.restored
    assert report.replayed_turns > 50


def test_check_loop_finds_one_that_is_not() -> None:
    class Careless(Loop):
        tries = 0

        async def generate_group(self, group: LiveGroup) -> None:
            Careless.tries += 1
            for rollout in group.rollouts[: 2 + Careless.tries % 2]:
                await group.run(rollout)

    with pytest.raises(AssertionError, match="follows from something else than its rollout"):
        check_loop(Careless(World()), group_size=3, sampling=Sampling(2))


@pytest.mark.slow
@each_way
def test_cancelled_at_every_step(backend: Literal["asyncio", "trio"], native: bool) -> None:
    async def evicted_once(engine: Engine) -> None:
        async with create_task_group() as group:
            group.start_soon(until_the_end, engine, [])
            await sleep(9.0)
            async with engine.paused(PauseMode.EVICT):
                pass

    def make() -> tuple[Engine, ScriptedController]:
        controller = server()
        return Engine(controller, task_of(Mixed(World()))), controller

    cancelled_at_every_step(make, evicted_once, backend, native)
