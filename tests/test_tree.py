"""`engine.tree()`: what every live thing waits for, at any moment."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from anyio import Event, create_task_group, current_time, sleep
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from rollnest import (
    AsyncStrategy,
    Capacity,
    Engine,
    EngineTree,
    Limits,
    PauseMode,
    Rollout,
    Sample,
    SampleTree,
    Sampling,
    Wait,
)
from rollnest.abc import Attempt, Instrument
from rollnest.errors import EngineBroken, InferenceError, PauseFailed
from rollnest.testing import (
    Reply,
    ScriptedController,
    assert_conserved,
    free_running_threads,
)

from .helpers import in_turn, score_one, spec

pytestmark = pytest.mark.anyio


def samples(tree: EngineTree) -> Iterator[SampleTree]:
    for task in tree.tasks.values():
        for group in task.groups:
            yield from group.samples


def waits(engine: Engine) -> dict[str, Wait]:
    """What each live sample waits for; each waits for one thing."""
    found: dict[str, Wait] = {}
    for sample in samples(engine.tree()):
        if sample.status == "live":
            (found[sample.uid],) = sample.waits
    return found


def stuck() -> ScriptedController:
    """A server that never answers anything but an abort."""
    return ScriptedController(in_turn(Reply([5, 6, 7, 0], delay=10_000.0)))


async def cancel_after(
    group: TaskGroup, engine: Engine, seconds: float, look: Callable[[], None]
) -> None:
    group.start_soon(engine.next_batch, 1, name="trainer")
    await sleep(seconds)
    look()
    json.dumps(engine.tree().to_dict())
    group.cancel_scope.cancel()


async def test_turns_at_the_server_and_turns_without_a_slot() -> None:
    def look() -> None:
        tree = engine.tree()
        assert tree.state == "open"
        assert tree.turns_in_flight == 2
        kinds = [wait.kind for wait in waits(engine).values()]
        assert sorted(kinds) == ["server", "server", "turn slot"]
        for uid, wait in waits(engine).items():
            assert uid.startswith("task/p")
            assert wait.seconds == 30.0
        assert (tree.slots["turn"].used, tree.slots["turn"].size) == (2, 2)
        assert tree.slots["turn"].waiting == 1
        (server, *_) = [w for w in waits(engine).values() if w.kind == "server"]
        assert server.what.startswith("the server (0 of 20 tokens, v0, attempt ")
        (slot,) = [w for w in waits(engine).values() if w.kind == "turn slot"]
        assert slot.what == "a turn slot (2 of 2 used)"

    async with (
        Engine(stuck(), spec(group_size=3), capacity=Capacity(turns=2)) as engine,
        create_task_group() as group,
    ):
        await cancel_after(group, engine, 30, look)


async def test_since_is_when_the_turn_went_through_the_gate() -> None:
    script = in_turn(Reply([5, 0], delay=10.0), Reply([5, 0], delay=10_000.0))

    def look() -> None:
        seconds = {wait.kind: wait.seconds for wait in waits(engine).values()}
        assert seconds == {"server": 5.0}

    async with (
        Engine(ScriptedController(script), spec(judger=None), capacity=Capacity(turns=1)) as engine,
        create_task_group() as group,
    ):
        await cancel_after(group, engine, 15, look)


async def test_a_turn_that_was_sent_again_waits_for_the_server_since_then() -> None:
    sent: list[float] = []

    class Sent(Instrument):
        def turn_started(self, attempt: Attempt) -> None:
            sent.append(current_time())

    def look() -> None:
        (wait,) = waits(engine).values()
        assert len(sent) == 2
        assert sent[1] > sent[0]
        assert (wait.kind, wait.seconds) == ("server", current_time() - sent[1])

    down = Reply([], error=InferenceError("503: down", retryable=True))
    script = in_turn(down, Reply([5, 0], delay=10_000.0))
    async with (
        Engine(ScriptedController(script), spec(group_size=1), instruments=[Sent()]) as engine,
        create_task_group() as group,
    ):
        await cancel_after(group, engine, 15, look)


async def test_the_gate_and_who_closed_it() -> None:
    async with (
        Engine(stuck(), spec(strategy=AsyncStrategy()), batch_size=1) as engine,
        create_task_group() as group,
    ):
        await sleep(10)
        async with engine.paused(PauseMode.WAIT, grace=0):
            await sleep(3.5)
            tree = engine.tree()
            assert tree.pause is not None
            assert (tree.pause.mode, tree.pause.phase) == ("WAIT", "body")
            assert tree.pause.by in str(tree)
            assert tree.pause.seconds == pytest.approx(3.5)
            for wait in waits(engine).values():
                assert wait.kind == "gate"
                assert wait.seconds == pytest.approx(3.5)
                assert wait.what == "the gate (closed for 3.5 s)"
            assert tree.tasks["task"].idle == "the gate is closed"
        assert engine.tree().pause is None
        await checkpoint()
        group.cancel_scope.cancel()


async def test_the_phases_of_a_pause() -> None:
    phases: list[tuple[str, int]] = []

    class Controller(ScriptedController):
        def note(self) -> None:
            pause = engine.tree().pause
            assert pause is not None
            phases.append((pause.phase, pause.turns_in_flight))

        async def abort(self, ids: Any) -> None:
            self.note()
            await super().abort(ids)

        async def pause(self, mode: PauseMode) -> None:
            self.note()
            await super().pause(mode)

        async def resume(self) -> None:
            self.note()
            await super().resume()

    controller = Controller(in_turn(Reply([5], delay=10_000.0)))
    async with Engine(controller, spec(strategy=AsyncStrategy()), batch_size=1) as engine:
        await sleep(1)
        async with engine.paused():
            controller.note()
    assert phases[0] == ("quiet", 2)
    assert phases[-3:] == [("confirm", 0), ("body", 0), ("leaving", 0)]


@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
async def test_tools_and_their_slots(sync: bool) -> None:
    begun, release = threading.Event(), threading.Event()

    async def add(a: int) -> int:
        begun.set()
        await sleep(10_000)
        return a

    def add_in_thread(a: int) -> int:
        begun.set()
        assert release.wait(20)
        return a

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await sleep(rollout.index)
        await rollout.tool(add_in_thread if sync else add, 1)

    def look() -> None:
        name = "add_in_thread" if sync else "add"
        first, second = (waits(engine)[f"task/p0/0/{i}"] for i in range(2))
        assert (first.kind, first.what, first.seconds) == ("tool", f"its tool {name}", 5.0)
        assert (second.kind, second.seconds) == ("tool slot", 4.0)
        assert second.what == "a tool slot (1 of 1 used)"
        slots = engine.tree().slots["tool"]
        assert [holder.name for holder in slots.holders] == [f"tool {name} of task/p0/0/0"]
        assert (slots.used, slots.waiting) == (1, 1)
        release.set()

    task = spec(loop=loop, shuffle=False, limits=Limits(tool=None))
    async with (
        Engine(ScriptedController(), task, capacity=Capacity(tools=1)) as engine,
        create_task_group() as group,
    ):
        with (
            free_running_threads()
        ):  # not at the end: the released thread is waited for in real time
            await cancel_after(group, engine, 5, look)


async def test_the_agent_loop_itself_and_several_contexts_at_once() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.index == 0:
            await sleep(10_000)
        side = rollout.segment([3, 4])
        async with create_task_group() as group:
            group.start_soon(side.generate)
            group.start_soon(rollout.tool, sleep, 10_000)

    script = in_turn(*[Reply([5, 0], delay=1.0)] * 2, Reply([5], delay=10_000.0))

    def look() -> None:
        found = {sample.index: sample for sample in samples(engine.tree())}
        assert [(w.kind, w.what, w.seconds) for w in found[0].waits] == [
            ("loop", "its agent loop", 4.0)
        ]
        assert [w.kind for w in found[1].waits] == ["server", "tool"]
        assert (found[1].turns, found[1].tokens, found[1].version) == (1, 2, 0)

    async with (
        Engine(ScriptedController(script), spec(loop=loop, limits=Limits(tool=None))) as engine,
        create_task_group() as group,
    ):
        await cancel_after(group, engine, 5, look)


async def test_judgers_and_their_slots() -> None:
    async def judge(sample: Sample) -> float:
        await sleep(10_000)
        return 1.0

    def look() -> None:
        kinds = {wait.kind: wait for wait in waits(engine).values()}
        assert set(kinds) == {"judger", "judge slot"}
        assert kinds["judger"].what == "its judger"
        assert kinds["judge slot"].what == "a judge slot (1 of 1 used)"
        assert {wait.seconds for wait in kinds.values()} == {7.0}
        (holder,) = engine.tree().slots["judge"].holders
        assert holder.name.startswith("judger of task/p")

    task = spec(judger=judge, limits=Limits(judge=None))
    async with (
        Engine(ScriptedController(), task, capacity=Capacity(judges=1)) as engine,
        create_task_group() as group,
    ):
        await cancel_after(group, engine, 7, look)


class Ranking:
    """Judges whole groups, and never ends."""

    async def batch_judge(self, given: Any) -> list[float]:
        await sleep(10_000)
        return [1.0 for _ in given]


async def test_members_wait_for_their_siblings_and_the_group_for_its_judger() -> None:
    script = in_turn(Reply([5, 0]), Reply([5, 0], delay=10.0))

    def look_early() -> None:
        assert {w.kind for w in waits(engine).values()} == {"siblings", "server"}
        assert engine.tree().longest(1)[0][1].kind == "server"

    def look_late() -> None:
        (group_tree,) = engine.tree().tasks["task"].groups
        (wait,) = group_tree.waits
        assert (wait.kind, wait.seconds) == ("judger", 10.0)
        assert {w.kind for w in waits(engine).values()} == {"siblings"}
        (holder,) = engine.tree().slots["judge"].holders
        assert holder.name == f"judger of {group_tree.uid}"
        assert f"group 0 of prompt '{group_tree.prompt}', 20.0 s; its judger, 10.0 s" in str(
            engine.tree()
        )

    task = spec(judger=Ranking())
    async with (
        Engine(ScriptedController(script), task) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await sleep(5)
        look_early()
        await sleep(15)
        look_late()
        group.cancel_scope.cancel()


async def test_a_policy_judger_waits_for_the_gate() -> None:
    class Judge:
        uses_policy = True

        async def judge(self, sample: Sample) -> float:
            return 1.0

    script = in_turn(Reply([5, 0], delay=1.0))
    async with (
        Engine(ScriptedController(script), spec(judger=Judge())) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await sleep(0.5)
        async with engine.paused(PauseMode.WAIT):
            await sleep(2)
            assert {w.kind for w in waits(engine).values()} == {"gate"}


async def test_the_consumer_and_the_producers() -> None:
    async def loop(rollout: Rollout) -> None:
        await sleep(10_000)

    tasks = [
        spec(name="slow", loop=loop),
        spec(name="quick", judger=score_one),
        spec(name="off", weight=0),
    ]
    async with (
        Engine(ScriptedController(), tasks) as engine,
        create_task_group() as group,
    ):
        assert engine.tree().consumer is None
        assert engine.tree().tasks["quick"].idle == "no batch is asked for"
        group.start_soon(engine.next_batch, 6)
        await sleep(12)
        tree = engine.tree()
        assert tree.consumer is not None
        assert (tree.consumer.groups, tree.consumer.seconds) == (6, 12.0)
        assert tree.consumer.lacking == {"slow": 3}
        slow, quick = tree.tasks["slow"], tree.tasks["quick"]
        assert (slow.demand, slow.flight, slow.ready, len(slow.groups)) == (3, 3, 0, 3)
        assert (quick.demand, quick.flight, quick.ready, len(quick.groups)) == (3, 0, 3, 0)
        assert slow.idle == quick.idle == "what is in flight and ready is enough"
        page = str(tree)
        assert "next_batch(6) waits, 12.0 s: lacks 3 of 'slow'" in page
        assert "task 'slow': 3 groups in flight, 0 ready; starts none" in page
        assert tree.text(groups=1).count("group ") == 1
        assert "and 2 younger groups" in tree.text(groups=1)
        group.cancel_scope.cancel()


async def test_prompts_that_are_used_up_and_batches_that_are_not_committed() -> None:
    task = spec(epochs=1, strategy=AsyncStrategy(), starve_after=1)
    async with Engine(ScriptedController(), task, batch_size=40) as engine:
        batch = await engine.next_batch()
        tree = engine.tree()
        assert tree.tasks["task"].idle == "its prompts are used up"
        assert tree.uncommitted == (1,)
        assert "batches not committed: 1" in str(tree)
        engine.commit(batch)
        assert engine.tree().uncommitted == ()


async def test_before_after_and_in_between() -> None:
    engine = Engine(ScriptedController(), spec())
    assert str(engine.tree()) == "engine new, v0, 0 turns at the server"
    async with engine:
        assert engine.tree().state == "open"
        await engine.next_batch(1)
    assert engine.tree().state == "closed"
    assert not list(samples(engine.tree()))


def test_after_the_event_loop_has_ended(anyio_backend: tuple[str, dict[str, Any]]) -> None:
    import anyio

    engines: list[Engine] = []

    async def run() -> None:
        async with Engine(ScriptedController(), spec()) as engine:
            await engine.next_batch(1)
        engines.append(engine)

    name, options = anyio_backend
    anyio.run(run, backend=name, backend_options=options)
    assert engines[0].tree().state == "closed"


async def test_of_a_broken_engine() -> None:
    controller = ScriptedController(update_error=RuntimeError("no"))
    async with Engine(controller, spec()) as engine:
        with pytest.raises(RuntimeError, match="no"):
            async with engine.paused() as pause:
                await pause.update_weights({})
        assert engine.tree().state.startswith("broken: nobody knows which weights")
        with pytest.raises(EngineBroken):
            await engine.next_batch(1)


async def test_an_abandoned_thread_is_named_until_it_ends() -> None:
    begun, release, ended = threading.Event(), threading.Event(), Event()

    def judge(sample: Sample) -> float:
        begun.set()
        assert release.wait(20)
        return 1.0

    task = spec(judger=judge, group_size=1, shuffle=False, limits=Limits(judge=5.0))
    async with (
        Engine(ScriptedController(), task, capacity=Capacity(judges=1)) as engine,
        create_task_group() as group,
    ):
        with free_running_threads():
            group.start_soon(engine.next_batch, 1)
            while not begun.is_set():
                await checkpoint()
            await sleep(8)
        slots = engine.tree().slots["judge"]
        (holder,) = slots.abandoned
        assert (holder.name, holder.seconds) == ("judger of task/p0/0/0", 3.0)
        assert "judger of task/p0/0/0: abandoned, its thread still runs, 3.0 s" in str(
            engine.tree()
        )
        assert (slots.used, slots.size) == (1, 1)
        assert "judge slot" in {w.kind for w in waits(engine).values()}
        group.cancel_scope.cancel()
        release.set()
        while engine.statistics().abandoned_threads:
            await checkpoint()
        slots = engine.tree().slots["judge"]
        assert (slots.used, slots.holders) == (0, ())
        ended.set()


async def test_a_rendering_that_takes_long_is_told() -> None:
    begun, release = threading.Event(), threading.Event()

    class Tokenizer:
        stop_token_ids = frozenset({0})

        def encode(self, text: str) -> list[int]:
            return [1]

        def decode(self, ids: Any) -> str:
            return ""

        def render(self, messages: Any, *, tools: Any = None) -> list[int]:
            begun.set()
            assert release.wait(20)
            return [1, 2]

        def render_suffix(self, messages: Any, *, tools: Any = None, closed: bool) -> None:
            return None

    task = spec(prompts=["hello"])
    async with (
        Engine(ScriptedController(), task, tokenizer=Tokenizer()) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        while not begun.is_set():
            await checkpoint()
        (live,) = engine.tree().tasks["task"].groups
        assert [wait.kind for wait in live.waits] == ["prompt"]
        release.set()


class Looking(Instrument):
    """Looks at the tree whenever anything happens."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.looks = 0

    def look(self) -> None:
        assert self.engine is not None
        tree = self.engine.tree()
        str(tree)
        self.looks += 1
        for name, task in tree.tasks.items():
            # What is in the tree and what is in the table is one thing, except in the step that settles a group.
            assert abs(len(task.groups) - self.engine.statistics().tasks[name].flight) <= 1
            for group in task.groups:
                for sample in group.samples:
                    assert (sample.status == "live") == bool(sample.waits)

    def group_started(self, task: str, visit: int) -> None:
        self.look()

    def group_ended(self, group: Any, outcome: str) -> None:
        self.look()

    def turn_started(self, attempt: Attempt) -> None:
        self.look()

    def turn_ended(self, attempt: Attempt) -> None:
        self.look()

    def sample_ended(self, sample: Sample) -> None:
        self.look()

    def gate_closed(self, in_flight: int) -> None:
        self.look()

    def paused(self, quiet_seconds: float) -> None:
        self.look()

    def gate_opened(self, version: int) -> None:
        self.look()

    def batch_delivered(self, batch: Any) -> None:
        self.look()


async def test_from_an_instrument_at_any_moment(caplog: pytest.LogCaptureFixture) -> None:
    looking = Looking()
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy(max_staleness=2), judger=score_one)
    engine = Engine(controller, task, batch_size=4, instruments=[looking])
    looking.engine = engine
    async with engine:
        for _ in range(4):
            await engine.next_batch()
            async with engine.paused() as pause:
                await pause.update_weights({})
    assert not caplog.records  # an instrument that raises is taken out, with an entry in the log
    assert looking.looks > 100
    assert_conserved(engine, committed=controller.committed)


async def test_a_failed_pause_is_over() -> None:
    controller = ScriptedController(
        in_turn(Reply(range(1, 101), delay=1000.0, deaf=-1)), pause_hangs=True
    )
    task = spec(group_size=1, sampling=Sampling(100), strategy=AsyncStrategy())
    async with Engine(controller, task, batch_size=1, control_timeout=4.0) as engine:
        await sleep(1)
        with pytest.raises(PauseFailed):
            async with engine.paused(grace=1.0):
                pass
        assert engine.tree().pause is None
