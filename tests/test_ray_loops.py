"""Agent loops in Ray's actors, against a real Ray: what is asked of them is asked inside them.

What hosts must do is tested under virtual time in `test_hosting`; here is what Ray adds: processes, and their deaths.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import ray
from anyio import create_task_group
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollnest import (
    Batch,
    Capabilities,
    Engine,
    Limits,
    PauseMode,
    Prompt,
    Sample,
    Sampling,
    TaskSpec,
    Verdict,
)
from rollnest._loops import as_loop
from rollnest.abc import Attempt
from rollnest.errors import EngineBusy
from rollnest.hosting import Begin, Prepare
from rollnest.testing import ScriptedController, assert_conserved, check_sample
from rollnest_adapters.ray import RayCallFailed, RayLoops, RayOptions, call
from rollnest_adapters.ray._loop_actor import LoopActor

from . import ray_loops
from .ray_actors import HANG, until
from .test_hosting_machine import STEPS, Do, history, play

pytestmark = [pytest.mark.ray, pytest.mark.anyio, pytest.mark.usefixtures("local_ray")]

LIGHT = RayOptions(num_cpus=0)
OWN_TASKS = 2  # of an actor at rest: what owns the loops, and what waits for messages


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: Any) -> Any:
    return request.param


on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""What has nothing to do with the event loop; each such test starts actors."""


class Held(ScriptedController):
    """A policy that answers when it is let."""

    def __init__(self, **options: Any) -> None:
        super().__init__(stop_every=10_000, **options)
        self.held = True
        self.let = anyio.Event()

    async def generate(self, attempt: Attempt) -> None:
        self.waiting += 1
        try:
            while self.held:
                await self.let.wait()
        finally:
            self.waiting -= 1
        await super().generate(attempt)

    waiting = 0

    def go(self) -> None:
        """Answers from now on."""
        self.held = False
        self.let.set()


class Free(ScriptedController):
    """A policy that answers at once."""

    def __init__(self) -> None:
        super().__init__(stop_every=10_000)


def prompts(label: object = None, count: int = 8) -> list[Prompt]:
    return [Prompt(f"p{i}", token_ids=[1 + i, 2], label=label) for i in range(count)]


def task_of(loop: Any, **options: Any) -> TaskSpec:
    defaults: dict[str, Any] = {"group_size": 4, "sampling": Sampling(3), "shuffle": False}
    defaults |= {"prompts": prompts(), "judger": None}
    return TaskSpec("task", **(defaults | {"loop": loop} | options))


def in_actors(loop: Any, workers: int = 2, **options: Any) -> RayLoops:
    return RayLoops(loop, workers, options=LIGHT, **options)


def columns(samples: Iterable[Sample]) -> list[list[int]]:
    ids: list[list[int]] = []
    for sample in samples:
        check_sample(sample)
        ids.append(sample.segments[0].ids.tolist())
    return ids


async def rests(loops: RayLoops) -> bool:
    """Whether nothing is left in any of the actors."""
    states = await loops.states()
    return len(states) == loops.workers and all(
        (s.rollouts, s.requests, s.abandoned, len(s.tasks)) == ((), 0, "", OWN_TASKS)
        for s in states
    )


def kill(loops: RayLoops) -> None:
    """Kills the actor that has the most to do, of those that live; the engine hears of it by itself."""
    link = max(loops._links, key=lambda link: (link.actor not in killed, len(link.host.sessions)))
    killed.append(link.actor)
    ray.kill(link.actor)


killed: list[Any] = []


@asynccontextmanager
async def taking(engine: Engine, n: int = 1) -> AsyncIterator[list[Batch]]:
    """Takes a batch in a task of its own, which has ended at the block's end."""
    got: list[Batch] = []

    async def take() -> None:
        got.append(await engine.next_batch(n))

    async with create_task_group() as tasks:
        tasks.start_soon(take)
        yield got


async def seen(true: Callable[[], bool]) -> None:
    async def ask() -> bool:
        return true()

    await until(ask)


async def test_the_same_task_runs_here_and_in_actors() -> None:
    async with Engine(Free(), task_of(ray_loops.talk)) as engine:
        here = await engine.next_batch(2)
    loops = in_actors(ray_loops.talk)
    with anyio.fail_after(HANG):
        async with Engine(Free(), task_of(loops)) as engine:
            there = await engine.next_batch(2)
            await until(partial(rests, loops))
            assert_conserved(engine)
            with pytest.raises(EngineBusy, match="is used by an engine already"):
                async with Engine(Free(), task_of(loops)):
                    pass
    assert columns(there.samples) == columns(here.samples)
    assert [s.finish_reason for s in there.samples] == ["enough"] * 8


async def test_killed_in_mid_turn_the_turn_comes_to_its_end_and_is_given_again() -> None:
    controller, loops = Held(), in_actors(ray_loops.talk)
    with anyio.fail_after(HANG):
        async with Engine(controller, task_of(loops)) as engine:
            async with taking(engine) as got:
                await seen(lambda: controller.waiting == 4)
                kill(loops)
                await seen(lambda: len(loops.hosts) == 1)
                controller.go()
            await until(partial(rests, loops))
            assert_conserved(engine, committed=controller.committed)
            statistics = engine.statistics()
    assert [len(ids) for ids in columns(got[0].samples)] == [12] * 4
    assert len(controller.prompts) == 12  # nothing was asked for twice
    assert statistics.total("replayed_turns") == 2
    assert statistics.total("redrawn") == 0


async def test_killed_in_mid_tool_the_tool_is_called_again_in_another_actor(tmp_path: Path) -> None:
    loops, controller = in_actors(ray_loops.waits_in_a_tool), Free()
    task = task_of(loops, prompts=prompts(str(tmp_path)), limits=Limits(tool=None))
    with anyio.fail_after(HANG):
        async with Engine(controller, task) as engine:
            async with taking(engine) as got:
                await seen(lambda: len(list(tmp_path.iterdir())) == 4)
                assert {w.kind for w in waits(engine)} == {"tool"}
                kill(loops)
                kill(loops)
            await until(partial(rests, loops))
            assert_conserved(engine, committed=controller.committed)
    assert [ids[3] for ids in columns(got[0].samples)] == [700] * 4
    assert len(controller.prompts) == 8


def waits(engine: Engine) -> list[Any]:
    groups = [group for task in engine.tree().tasks.values() for group in task.groups]
    return [wait for group in groups for sample in group.samples for wait in sample.waits]


async def test_killed_in_mid_judge_a_verdict_is_not_asked_for_again() -> None:
    asked: list[str] = []
    let = anyio.Event()

    async def judge(sample: Sample) -> float:
        asked.append(sample.uid)
        await let.wait()
        return 0.25

    loops = in_actors(judged)
    with anyio.fail_after(HANG):
        async with Engine(Free(), task_of(loops, judger=judge)) as engine, taking(engine) as got:
            await seen(lambda: len(asked) == 4)
            kill(loops)
            await seen(lambda: len(loops.hosts) == 1)
            let.set()
    assert len(asked) == 4
    assert [sample.verdict for sample in got[0].samples] == [Verdict(0.25)] * 4


async def judged(rollout: Any) -> None:
    await rollout.generate()
    assert (await rollout.judge()).score == 0.25
    await rollout.tool(ray_loops.add, 1, 2)


async def parity(sample: Sample) -> float:
    return float(sum(sample.segments[0].ids) % 2)


async def test_the_same_group_loop_runs_here_and_in_actors() -> None:
    batches: list[Batch] = []
    loops = in_actors(ray_loops.Auction(replayable=False))
    with anyio.fail_after(HANG):
        for loop in (loops.loop, loops):
            async with Engine(Free(), task_of(loop, judger=parity)) as engine:
                batches.append(await engine.next_batch(2))
                if loop is loops:
                    await until(partial(rests, loops))
                assert_conserved(engine)
                left = engine.statistics().tasks["task"].members_shrunk
                assert left == {"not needed": 2, "resampled": 2}
    here, there = batches
    assert columns(there.samples) == columns(here.samples)
    assert [sample.reward for sample in there.samples] == [sample.reward for sample in here.samples]


class HeldAtThird(Held):
    """A policy that answers two requests at once, and the others when it is let."""

    async def generate(self, attempt: Attempt) -> None:
        if len(self.prompts) < 2:
            await ScriptedController.generate(self, attempt)
        else:
            await super().generate(attempt)


@pytest.mark.parametrize("replayable", [False, True])
async def test_a_group_whose_actor_is_killed_runs_again_in_another(replayable: bool) -> None:
    loops, controller = in_actors(ray_loops.Auction(replayable=replayable)), HeldAtThird()
    with anyio.fail_after(HANG):
        async with Engine(controller, task_of(loops, judger=parity)) as engine:
            async with taking(engine) as got:
                await seen(lambda: controller.waiting == 1)  # a member is run
                kill(loops)
                await seen(lambda: len(loops.hosts) == 1)
                controller.go()
            await until(partial(rests, loops))
            assert_conserved(engine, committed=controller.committed)
            figures = engine.statistics().tasks["task"]
        async with Engine(Free(), task_of(loops.loop, judger=parity)) as engine:
            here = await engine.next_batch(1)
    assert columns(got[0].samples) == columns(here.samples)
    assert (figures.redrawn, figures.members_delivered, figures.diverged) == (1, 3, 0)
    assert figures.replayed_turns == (3 if replayable else 0)
    # What was in flight is not asked for again, or is thrown away with the rest.
    assert len(controller.prompts) == 10 if replayable else len(controller.prompts) >= 12


async def test_bug_067_a_pause_does_not_wait_behind_what_actors_are_busy_with(
    tmp_path: Path,
) -> None:
    """No actor is asked: turns at the server and tools in actors are as many as there may be, and never end."""
    loops = in_actors(partial(both, directory=str(tmp_path)))
    controller = Held()
    task = task_of(loops, group_size=8, limits=Limits(tool=None))
    with anyio.fail_after(HANG):
        async with Engine(controller, task, control_timeout=0.2) as engine, taking(engine):
            await seen(lambda: len(list(tmp_path.iterdir())) == 4)
            for mode in (PauseMode.KEEP, PauseMode.ABORT, PauseMode.WAIT):
                await seen(lambda: controller.waiting == 4)
                async with engine.paused(mode, grace=0.0):
                    assert controller.waiting == 0 or mode is PauseMode.KEEP
                    states = await loops.states()
                    assert sum(len(state.rollouts) for state in states) == 8
                    assert_conserved(engine)
            async with engine.paused(PauseMode.EVICT, grace=0.0):
                assert engine.statistics().total("flight") == 0
                assert await rests(loops)
            controller.go()


async def both(rollout: Any, directory: str) -> None:
    """Half of a group begins with a turn, the other half with a tool that hangs once."""
    if rollout.index % 2:
        await rollout.tool(ray_loops.hang_once, directory, rollout.index)
    await rollout.generate()


async def is_gone(actor: Any) -> bool:
    try:
        await call(actor.state)
    except RayCallFailed as failed:
        return failed.actor_gone
    return False


@pytest.mark.parametrize("how", ["scope", "native"])
async def test_however_the_engine_is_left_nothing_is_left(how: str, anyio_backend: str) -> None:
    if how == "native" and anyio_backend == "trio":
        how = "error"
    loops, controller = in_actors(ray_loops.talk, 1), Held()
    actors: list[Any] = []

    async def run() -> None:
        async with Engine(controller, task_of(loops)) as engine, taking(engine):
            await seen(lambda: controller.waiting == 4)
            actors.extend(link.actor for link in loops._links)
            if how == "error":
                raise KeyError("of the trainer")
            if how == "native":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            else:
                scope.cancel()
            await anyio.sleep_forever()

    with anyio.fail_after(HANG):
        scope = anyio.CancelScope()
        try:
            async with create_task_group() as tasks:
                with scope:
                    if how == "native":
                        tasks.start_soon(run)
                    else:
                        await run()
        except* KeyError:
            assert how == "error"
        assert controller.open == {}
        assert loops.hosts == []
        assert loops._links == []
        for actor in actors:
            await until(partial(is_gone, actor))  # a kill is a message to Ray


async def test_what_an_actor_does_not_end_is_killed_with_it(tmp_path: Path) -> None:
    loops = in_actors(ray_loops.stubborn, 1, grace=0.2)
    task = task_of(loops, prompts=prompts(str(tmp_path), 2), group_size=1)
    with anyio.fail_after(HANG):
        async with Engine(Free(), task) as engine:
            async with taking(engine, 2) as got:
                await seen(lambda: (tmp_path / "stubborn").exists())
                async with engine.paused(PauseMode.EVICT, grace=0.0):
                    assert loops.hosts == []
            await until(partial(rests, loops))
    assert len(columns(got[0].samples)) == 2


@on_asyncio
async def test_a_loop_that_takes_its_actor_down_fails_and_no_other_does() -> None:
    loops = in_actors(ray_loops.deadly, 2)
    with anyio.fail_after(HANG):
        task = task_of(loops, prompts=prompts(count=6), group_size=1)
        async with Engine(Free(), task) as engine:
            result = await engine.evaluate("task")
    status = {s.prompt.uid: s.failure for s in result.samples}
    failure = status.pop("p0")
    assert failure is not None
    assert "lost 4 times" in failure.message
    # Whoever was there with it is not to blame.
    assert [uid for uid, failed in status.items() if failed is not None] == []


@on_asyncio
async def test_what_an_actor_can_not_load_ends_the_loop_that_waits_for_it() -> None:
    actor = LoopActor("a", pickle.dumps(as_loop(ray_loops.talk)), 1.0)
    capabilities = Capabilities(vocab_size=100, max_context=100)
    prepare = Prepare("task", 0, capabilities, None, Sampling(3), None, 100, frozenset())
    begin = Begin(1, 0, Prompt("p", token_ids=[1]), array("i", [1]), 0, 0, 0, 0, False)
    with anyio.fail_after(HANG):
        async with create_task_group() as tasks:
            tasks.start_soon(actor.run)
            await actor.ready()
            await actor.push([(0, pickle.dumps(prepare)), (1, pickle.dumps(begin))])
            (ask,) = pickle.loads(await actor.pull())
            assert (ask.session, (await actor.state()).requests) == (1, 1)
            await actor.push([(1, b"of a class that is not here")])
            (ended,) = pickle.loads(await actor.pull())
            assert ended.failure.kind == "loop"
            (ended,) = pickle.loads(await actor.pull())
            assert ended.failure is None
            assert (await actor.state()).rollouts == ()
            tasks.cancel_scope.cancel()


def test_what_can_not_be_sent_is_named_when_the_task_is_described() -> None:
    lock = threading.Lock()

    async def loop(rollout: Any) -> None:
        with lock:
            await rollout.generate()

    with pytest.raises(TypeError, match=r"loop must be picklable, to be sent to an actor.*lock"):
        RayLoops(loop)
    with pytest.raises(TypeError, match=r"prompts\[0\] must be picklable.*lock.*got Prompt"):
        task_of(RayLoops(ray_loops.talk), prompts=prompts(lock))


@on_asyncio
async def test_a_prompt_that_can_not_be_sent_fails_its_samples_only() -> None:
    odd = Prompt("odd", token_ids=[5], label=threading.Lock())
    with anyio.fail_after(HANG):
        task = task_of(in_actors(ray_loops.talk, 1), prompts=[*prompts(count=2), odd], group_size=1)
        async with Engine(Free(), task) as engine:
            result = await engine.evaluate("task")
    failures = [sample.failure for sample in result.samples]
    assert failures[:2] == [None, None]
    assert failures[2] is not None
    assert failures[2].kind == "data"
    assert "prompt 'odd' can't be pickled" in failures[2].message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers must be >= 1, got 0"),
        ({"grace": 0}, "grace must be finite, > 0, got 0"),
        ({"start_timeout": -1}, "start_timeout must be"),
        ({"options": RayOptions(max_restarts=3)}, "max_restarts must be 0 or None.*got 3"),
        ({"options": RayOptions(lifetime="detached")}, "must not be 'detached'"),
    ],
)
def test_bad_options_are_named(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RayLoops(ray_loops.talk, **options)


@on_asyncio
async def test_an_actor_that_can_not_start_says_why() -> None:
    loops = in_actors(ray_loops.fails_to_load)
    with anyio.fail_after(HANG), pytest.raises(RuntimeError, match="no module named sandbox"):
        async with Engine(Free(), task_of(loops)):
            pass
    assert loops._links == []


async def test_a_cluster_that_lacks_what_they_need_is_told() -> None:
    loops = RayLoops(ray_loops.talk, 1, options=RayOptions(num_cpus=512), start_timeout=0.5)
    said = r"0 of 1 actors of RayLoops.* started within 0.5 s; they need \{'num_cpus': 512"
    with anyio.fail_after(HANG), pytest.raises(TimeoutError, match=said):
        async with Engine(Free(), task_of(loops)):
            pass


class KillableLoops(RayLoops):
    """Actors that a drawn history kills."""

    kills = 0

    def kill(self) -> None:
        if self._links:
            self.kills += 1
            kill(self)

    async def orphans(self) -> list[str]:
        return [uid for state in await self.states() for uid in state.rollouts]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_any_history_of_killed_actors_keeps_the_invariants(backend: str) -> None:
    total = 0

    @settings(
        max_examples=2,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @given(STEPS, st.sampled_from(["take", "leave", "cancel"]))
    def run(steps: Sequence[Do], end: str) -> None:
        nonlocal total
        loops = KillableLoops(partial(play, unit=0.01), 2, options=LIGHT)
        main: Callable[..., Awaitable[Any]] = history
        anyio.run(main, loops, loops, [Do("take"), *steps], end, 0.01, backend=backend)
        total += loops.kills

    run()
    assert total > 0
