"""The state machine: drawn steps, played against a live engine under virtual time.

Steps are drawn up front and interpreted inside one async function: through a blocking portal, virtual time would run
to every deadline between two steps. A step that does not apply does the nearest thing that does. After each of them
everything is compared with the model of `tests.machine_model`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import anyio
from anyio import (
    CancelScope,
    Event,
    create_task_group,
    current_time,
    fail_after,
    move_on_after,
    sleep,
)
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from attrs import evolve, field, frozen
from hypothesis import strategies as st

from rollnest import (
    AsyncStrategy,
    Batch,
    Capacity,
    Engine,
    EvalResult,
    FailurePolicy,
    Limits,
    PauseMode,
    SyncStrategy,
)
from rollnest.errors import (
    EndOfPrompts,
    EngineBroken,
    EngineBusy,
    EngineClosed,
    EvaluationCancelled,
    PauseFailed,
    RollnestError,
    Starved,
    WeightsState,
    WeightUpdateFailed,
)
from rollnest.testing import assert_conserved, virtual_backends

from .machine_model import CALM, FAULTS, Mood, Plan, Server, Watcher, World
from .machine_saves import SavedRun

__all__ = ["ENDS", "MODES", "RULES", "STATES", "Setting", "Step", "play", "runs"]

End: TypeAlias = Literal[
    "normal", "error", "cancel", "native", "drain", "unknown", "interrupted", "stuck"
]
ENDS: Sequence[End] = (
    "drain",
    "normal",
    "error",
    "cancel",
    "native",
    "drain",
    "drain",
    "unknown",
    "interrupted",
    "stuck",
)
MODES = tuple(PauseMode)
STATES = ("drawn", "in a turn", "in a tool", "in a judge", "ready")
_LONG = 1e6  # seconds; whatever takes that long never ends
_TICK = 1e-3
_PATIENCE = 3.0  # seconds for which a pause waits for an evaluation
_OUTAGE = 1e5  # seconds; longer than any run's server is down


@frozen(repr=False)
class Step:
    """One step: a method of the machine, and its arguments."""

    rule: str
    arguments: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"{self.rule}({', '.join(map(repr, self.arguments))})"


@frozen(kw_only=True)
class Setting:
    """What a run is made of."""

    plans: tuple[Plan, ...] = (Plan(),)
    batch_size: int = 2
    publish_every: int = 1
    capacity: Capacity = field(factory=Capacity)
    seed: int = 0
    mood: Mood = CALM
    end: End = "normal"


class Boom(Exception):
    """An error of the user's own."""


class Replaced(Exception):
    """The engine is left, and another one goes on from a checkpoint."""


class _Consumer:
    """A `next_batch` in a task of its own."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.scope = CancelScope()
        self.begun = Event()
        self.done = Event()
        self.batch: Batch | None = None
        self.error: RollnestError | None = None
        self.task: asyncio.Task[Any] | None = None
        self.native = False


class _Evaluator:
    """An `evaluate` in a task of its own."""

    def __init__(self, on_update: Literal["wait", "cancel", "mark"], limit: int | None) -> None:
        self.on_update: Literal["wait", "cancel", "mark"] = on_update
        self.limit = limit
        self.scope = CancelScope()
        self.begun = Event()
        self.done = Event()
        self.result: EvalResult | None = None
        self.error: RollnestError | None = None
        self.task: asyncio.Task[Any] | None = None
        self.native = False


class _Pauser:
    """A `paused()` block in a task of its own."""

    def __init__(self, grace: float, mode: PauseMode, when: str | None = None) -> None:
        self.grace = grace
        self.mode = mode
        self.when = when  # a group's state that it lies in wait for
        self.scope = CancelScope()
        self.phase: Literal["closing", "body", "leaving", "done"] = "closing"
        self.moved = Event()  # set when the phase changes
        self.begun = Event()
        self.release = Event()
        self.exit = "normal"
        self.pause: Any = None
        self.error: BaseException | None = None
        self.task: asyncio.Task[Any] | None = None
        self.native = False
        self.excused = False  # whether the controller did not confirm at some time

    def move(self, phase: Literal["body", "leaving", "done"]) -> None:
        """Goes on to the next phase."""
        self.phase = phase
        self.moved.set()
        self.moved = Event()


class Machine:
    """Plays the steps of one run."""

    def __init__(self, setting: Setting, backend: str, fired: Counter[str]) -> None:
        self.setting = setting
        self.backend = backend
        self.fired = fired
        plans = {f"t{i}": plan for i, plan in enumerate(setting.plans)}
        self.world = World(plans, setting.capacity, setting.seed, fired)
        self.world.mood = setting.mood
        self._make_engine()
        self.saved: SavedRun | None = None
        self.replacing: int | None = None  # what the trainer has trained, as `do_restore` said
        self.consumer: _Consumer | None = None
        self.evaluator: _Evaluator | None = None
        self.pauser: _Pauser | None = None
        self.tasks: TaskGroup
        self.last_pause: Any = None
        self.broken = False
        self.error: BaseException | None = None
        self.trail: list[object] = []

    def _make_engine(self) -> None:
        world, setting = self.world, self.setting
        self.server = Server(world)
        self.engine = Engine(
            self.server,
            [world.spec(name) for name in world.visits],
            batch_size=setting.batch_size,
            publish_every=setting.publish_every,
            capacity=setting.capacity,
            control_timeout=2.0,
            outage=_OUTAGE,
            seed=setting.seed,
            instruments=[Watcher(world)],
        )
        world.on_closed = self._meet
        engine = self.engine
        world.had_failures = lambda: engine.statistics().failed_requests > 0

    # The frame

    async def run(self, steps: Sequence[Step]) -> None:
        """Plays all steps, leaves the engine, and checks what is left."""
        with fail_after(10 * _LONG):
            async with create_task_group() as self.tasks:
                left = list(steps)
                while await self._live(left):
                    self._restore()
                self.tasks.cancel_scope.cancel()
        if self.error is not None:
            raise self.error

    async def _live(self, steps: list[Step]) -> bool:
        """Plays steps on one engine, taking them off the list; says whether another engine is to go on."""
        end = self.setting.end
        is_replaced = False
        try:
            with CancelScope() as whole:
                async with self.engine:
                    try:
                        self.world.entering = False
                        self.check()
                        while steps:
                            self.trail.append(step := steps.pop(0))
                            await getattr(self, f"do_{step.rule}")(*step.arguments)
                            self.check()
                            if self.broken:
                                break
                        self.trail.append(end)
                        await self._end(end)
                    except Exception as error:
                        is_replaced = isinstance(error, Replaced)
                        self.error = None if is_replaced or isinstance(error, Boom) else error
                        if self.error is None:
                            self.world.leaving = True
                            raise
                    self.world.leaving = True
                    if end == "cancel":
                        whole.cancel()
                    elif end == "native" and self.backend == "asyncio":
                        task = asyncio.current_task()
                        assert task is not None
                        task.cancel()
                    if end in ("cancel", "native"):
                        await sleep(0.5)
        except (Boom, Replaced):
            pass
        except EngineBroken as error:
            if not self.broken:
                self.error = self.error or error
        except asyncio.CancelledError:
            if end != "native" or self.backend != "asyncio":
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()  # else our own scope would take the one below for another one like it
        if self.error is None:
            try:
                await self._left()
                self.fired[f"leave: {'restore' if is_replaced else end}"] += 1
            except AssertionError as error:
                self.error = error
        return is_replaced and self.error is None

    def _restore(self) -> None:
        """Puts an engine in the place of the one that was left."""
        saved, trained = self.saved, self.replacing
        assert saved is not None
        trained = None if trained is None else max(saved.first, min(saved.last, trained))
        self.world = saved.begin(trained, self.world.mood, self.fired)
        self._make_engine()
        self.server.begin_with(saved.version)
        self.engine.load_state_dict(saved.state, trained_through=trained)
        self.last_pause = None

    async def _end(self, end: End) -> None:
        match end:
            case "error":
                self.world.leaving = True
                raise Boom
            case "drain":
                await self._drain()
            case "unknown" | "interrupted" | "stuck":
                await self._break(end)
            case _:
                pass

    async def _drain(self) -> None:
        """With a good server and a good judger, a batch comes sooner or later."""
        if self.broken:
            return
        self.world.mood = CALM
        await self.do_end_pause("normal", True)
        if self.broken:
            return
        if self.consumer is not None:
            await self.do_wait(_LONG)
        await self.do_take(1)
        self.check()
        if self.consumer is not None:
            raise AssertionError(f"nothing is produced any more: {self.engine.statistics()}")

    async def _break(self, how: str) -> None:
        """Breaks the engine: the weights become unknown, or the controller does not resume."""
        if self.broken:
            return
        self.world.mood = CALM
        pauser = await self._in_body()
        if pauser is None:
            return
        self.broken = self.world.leaving = True
        if self.engine.tree().outage is not None:
            how = (
                "unknown"  # a controller that can't resume while its server is down breaks nothing
            )
        if how == "stuck":
            self.server.resume_failures = 10_000
        else:
            self.world.published = self.world.version
            if how == "unknown":
                self.server.update_error = ZeroDivisionError("who knows")
                try:
                    await pauser.pause.update_weights({})
                except ZeroDivisionError:
                    pass
                else:
                    self.world.fault("update_weights() swallowed an error")
            else:
                with move_on_after(0.1):
                    await pauser.pause.update_weights(_slowly)
        await self.do_end_pause("normal", True)
        if not isinstance(pauser.error, EngineBroken):
            self.world.fault(f"the engine should be broken, but the block left {pauser.error!r}")
        await checkpoint()
        await self._expect(EngineBroken, self.engine.next_batch(1))
        if not self.world.gate_closed:
            self.world.fault("the gate of a broken engine opened")
        self.fired["break the engine"] += 1
        self.check()

    async def _left(self) -> None:
        """Nothing is left: no request, no group in flight; whoever waited has heard of it."""
        if self.server.open:
            self.world.fault(f"requests outlived the engine: {self.server.open}")
        if self.server.log[-1] != ("exit", 0):
            self.world.fault(f"the controller was left as {self.server.log[-1]}")
        with move_on_after(1.0):
            if self.consumer is not None:
                await self.consumer.done.wait()
                self._reap()
        if self.consumer is not None:
            self.world.fault("next_batch() outlived the engine")
        with move_on_after(1.0):
            if self.evaluator is not None:
                await self.evaluator.done.wait()
                self._reap()
        if self.evaluator is not None:
            self.world.fault("evaluate() outlived the engine")
        if self.pauser is not None:
            self.pauser.scope.cancel()
            with move_on_after(5.0):
                await self._until(self.pauser, "done")
            self._reap()
        for number in self.engine.statistics().total("flight"), sum(self.world.now.values()):
            if number:
                self.world.fault(f"still at work: {number}, {dict(self.world.now)}")
        for track in self.world.tracks.values():
            if track.where:
                self.world.fault(f"{track.rollout.uid} outlived the engine in its {track.where}")
        await self._expect(EngineBroken if self.broken else EngineClosed, self.engine.next_batch(1))
        self.check()

    # What must hold after every step

    def check(self) -> None:
        """Raises if anything is not as the model says."""
        world, statistics = self.world, self.engine.statistics()
        self._reap()
        world.check_ended()
        assert_conserved(self.engine, committed=world.committed)
        if self.server.committed + world.by_hand != world.committed:
            world.fault(f"{self.server.committed} were committed, {world.committed} seen")
        if self.server.while_paused:
            world.fault(f"I10: {self.server.while_paused} tokens were made while paused")
        paused = self.pauser is not None and self.pauser.phase == "body"
        if paused and (self._unfrozen() or not self.server.is_paused):
            world.fault(f"I10: {len(self.server.open)} requests inside a paused() block")
        evicts = self.pauser is not None and self.pauser.mode is PauseMode.EVICT
        if paused and evicts and statistics.total("flight"):
            world.fault("groups are in flight inside a pause that has evicted them")
        if statistics.version != world.version and not self.broken:
            world.fault(f"version {statistics.version}, the server has {world.version}")
        if statistics.batches != len(world.batches):
            world.fault(f"I8: {statistics.batches} batches, {len(world.batches)} were received")
        for name, visits in world.visits.items():
            self._check_ledger(name, Counter(v.state for v in visits.values()), len(visits))
        self._check_tree()
        if world.faults:
            raise AssertionError("; ".join(world.faults[:3]))

    def _check_tree(self) -> None:
        """What is shown of what lives is what lives."""
        world, tree = self.world, self.engine.tree()
        if not str(tree).startswith(f"engine {tree.state}, v"):
            world.fault(f"the tree's page begins with {str(tree)[:40]!r}")
        for slots in (tree.slots["judge"], tree.slots["tool"]):
            if slots.used != len(slots.holders):
                world.fault(f"{slots.used} slots used, {len(slots.holders)} holders known")
        for name, task in tree.tasks.items():
            if len(task.groups) != task.flight:
                world.fault(f"{task.flight} groups of {name} in flight, {len(task.groups)} shown")
            for sample in (sample for group in task.groups for sample in group.samples):
                if (sample.status == "live") != bool(sample.waits):
                    world.fault(f"{sample.uid} is {sample.status} and waits for {sample.waits}")

    def _check_ledger(self, name: str, states: Mapping[str, int], seen: int) -> None:
        """I7 and I8: the engine's figures against the events."""
        world, task = self.world, self.engine.statistics().tasks[name]
        again = task.redrawn - world.restarts[name]  # drawn again, and not begun yet
        given_up = task.dropped.get("expired", 0)
        rows = {
            "delivered": (task.delivered, states["delivered"]),
            "flight": (task.flight, states["flight"] + task.drawn - seen + again),
            "parked": (
                task.ready + task.waiting + given_up,
                states["ready"] + states["waiting"] - again,
            ),
            "dropped": (sum(task.dropped.values()) - given_up, states["dropped"]),
        }
        for row, (said, counted) in rows.items():
            if said != counted:
                world.fault(f"I7: {said} groups of {name} {row}, counted {counted}")
        for reason, count in world.dropped[name].items():
            if task.dropped.get(reason) != count:
                world.fault(f"I7: {task.dropped} dropped of {name}, counted {count} {reason}")

    # Steps

    async def do_ticks(self, count: int) -> None:
        """Lets others run, without time passing."""
        for _ in range(count):
            await checkpoint()
        self.fired["let others run"] += 1

    async def do_pass(self, seconds: float) -> None:
        """Lets time pass."""
        await sleep(seconds)
        self.fired["let time pass"] += 1

    async def do_mood(self, aspect: str, value: Any) -> None:
        """Changes how the server or the judgers behave."""
        self.world.mood = evolve(self.world.mood, **{aspect: value})
        if aspect == "pause" and self.pauser is not None:
            self.pauser.excused = True
        self.fired["change a mood"] += 1

    async def do_calm(self) -> None:
        """All is well again."""
        self.world.mood = CALM
        self.fired["calm down"] += 1

    async def do_ask(self, n: int, wait_in_pause: bool) -> None:
        """Starts a `next_batch`; beside another, it is refused."""
        if self.consumer is not None:
            for _ in range(4):
                await checkpoint()  # the other one must be waiting
            self._reap()
        if self.consumer is not None:
            await self._ask_beside(self.consumer, n)
            return
        self.consumer = consumer = _Consumer(n)
        self.tasks.start_soon(self._consume, consumer, wait_in_pause)
        self.fired["ask"] += 1
        await consumer.begun.wait()

    async def _ask_beside(self, other: _Consumer, n: int) -> None:
        try:
            with move_on_after(_TICK):
                self.world.received(await self.engine.next_batch(n, wait_in_pause=True), n)
        except EngineBusy:
            self.fired["ask: refused beside another"] += 1
            return
        except RollnestError:
            pass
        if not other.done.is_set():
            self.world.fault("next_batch() was not refused beside another")

    async def do_wait(self, seconds: float) -> None:
        """Waits for the `next_batch` that is on."""
        if self.consumer is None:
            await self.do_ask(self.setting.batch_size, True)
        if self.consumer is not None:
            with move_on_after(seconds):
                await self.consumer.done.wait()
        self._reap()
        self.fired["wait for a batch"] += 1

    async def do_take(self, n: int) -> None:
        """Takes a batch; if the gate is closed, it must be ready."""
        if self.consumer is not None:
            await self.do_wait(30.0)
            return
        await self.do_ask(n, False)
        mood = self.world.mood
        fails = mood.down or mood.fault == "error"  # maybe all the time, until the engine gives up
        calm = self.setting.end == "drain" and not self.pauser and not fails
        await self.do_wait(_LONG if calm else 30.0)

    async def do_cancel_ask(self, native: bool, ticks: int) -> None:
        """Cancels the `next_batch` that is on, or one that has just begun."""
        if self.consumer is None:
            await self.do_ask(1, True)
        await self.do_ticks(ticks)
        consumer = self.consumer
        if consumer is not None and not consumer.done.is_set():
            consumer.native = native and consumer.task is not None
            if consumer.native and consumer.task is not None:
                consumer.task.cancel()
            else:
                consumer.scope.cancel()
            await consumer.done.wait()
            how = "a batch had come" if consumer.batch is not None else "nothing was taken"
            self.fired[f"cancel a next_batch: {how}"] += 1
        self._reap()

    async def do_pause(self, grace: float, ticks: int, mode: PauseMode = PauseMode.ABORT) -> None:
        """Begins a pause; beside another, it is refused."""
        if self.pauser is not None and self.pauser.phase != "done":
            await self._expect(EngineBusy, _enter(self.engine))
            self.fired["pause: refused beside another"] += 1
            return
        self._reap()
        self.pauser = pauser = _Pauser(grace, mode)
        self.tasks.start_soon(self._paused, pauser)
        self.fired["begin a pause"] += 1
        await pauser.begun.wait()
        await self.do_ticks(ticks)

    async def do_pounce(self, state: str, mode: PauseMode) -> None:
        """Begins a pause at a moment when a group is in a state, if there is one soon."""
        if self.pauser is not None:
            return
        self.pauser = pauser = _Pauser(0.3, mode, state)
        self.tasks.start_soon(self._paused, pauser)
        if self.consumer is None:
            await self.do_ask(self.setting.batch_size, True)
        await pauser.begun.wait()
        self.fired["pounce"] += 1

    async def do_break_off(
        self, grace: float, ticks: int, seconds: float, how: str, mode: PauseMode
    ) -> None:
        """Begins a pause and ends it at that moment, wherever it stands then."""
        if self.pauser is None:
            await self.do_pause(grace, ticks, mode)
        if seconds:
            await sleep(seconds)
        await self.do_end_pause(how, True)
        self.fired["break a pause off"] += 1

    async def do_enter(self) -> None:
        """Waits until the pause is on."""
        if await self._in_body() is not None:
            self.fired["enter a pause"] += 1

    async def do_end_pause(self, how: str, wait: bool) -> None:
        """Leaves the pause, wherever it stands: normally, by an error, or by a cancellation."""
        pauser = self.pauser
        if pauser is None:
            return
        where = pauser.phase
        pauser.exit = how
        pauser.release.set()
        if how == "cancel":
            pauser.scope.cancel()
        elif how == "native":
            if pauser.task is None or pauser.native:
                pauser.scope.cancel()
            else:
                pauser.native = True
                pauser.task.cancel()
        if wait:
            await self._until(pauser, "done")
        else:
            await checkpoint()
        self._reap()
        if where != "done":
            self.fired[f"end a pause, {where}: {how}"] += 1

    async def do_update(self, kind: str, stay: bool) -> None:
        """New weights, or a failure to load them, inside a pause; then it may go on."""
        pauser = await self._in_body()
        if pauser is None:
            return
        pause, world, before = pauser.pause, self.world, self.world.version
        expected = before + 1
        world.published = before  # a batch that is taken meanwhile still counts from it
        match kind:
            case "dict":
                await pause.update_weights({"weights": expected})
            case "callable":
                await pause.update_weights(checkpoint)
            case "jump":
                expected = before + 3
                await pause.update_weights("/weights", expected)
            case "published":
                pause.published(expected)
                world.version = expected  # the trainer moved them; the server hears it later
            case "falling":
                expected = before
                await self._expect(ValueError, pause.update_weights({}, before))
            case "old" | "new":
                weights = WeightsState.OLD if kind == "old" else WeightsState.NEW
                expected = before if kind == "old" else expected
                self.server.update_error = WeightUpdateFailed("no", weights=weights)
                await self._expect(WeightUpdateFailed, pause.update_weights({}))
                self.server.update_error = None
            case _:
                raise ValueError(kind)
        world.published = None
        if world.version != expected or self.engine.version != expected:
            world.fault(f"update {kind}: {self.engine.version}, {world.version}, not {expected}")
        self.fired[f"update the weights: {kind}"] += 1
        if not stay:
            await self.do_end_pause("normal", True)

    async def do_cycle(self, kind: str, grace: float, mode: PauseMode) -> None:
        """A whole pause, with new weights."""
        if self.pauser is None:
            await self.do_pause(grace, 0, mode)
        await self.do_update(kind, False)
        await self.do_end_pause("normal", True)
        self.fired["pause, update, go on"] += 1

    async def do_evaluate(self, on_update: Any, limit: int | None, group_size: int) -> None:
        """Begins an evaluation, unless one is on."""
        if self.evaluator is not None:
            return
        self.evaluator = evaluator = _Evaluator(on_update, limit)
        self.tasks.start_soon(self._evaluate, evaluator, group_size)
        self.fired["begin an evaluation"] += 1
        await evaluator.begun.wait()

    async def do_await_evaluation(self, seconds: float) -> None:
        """Waits for the evaluation that is on, or for another one."""
        if self.evaluator is None:
            await self.do_evaluate("mark", 2, 1)
        if self.evaluator is not None:
            with move_on_after(seconds):
                await self.evaluator.done.wait()
        self._reap()
        self.fired["wait for an evaluation"] += 1

    async def do_cancel_evaluation(self, native: bool, ticks: int) -> None:
        """Cancels the evaluation that is on, or one that has just begun."""
        if self.evaluator is None:
            await self.do_evaluate("wait", None, 2)
        await self.do_ticks(ticks)
        evaluator = self.evaluator
        if evaluator is not None and not evaluator.done.is_set():
            evaluator.native = native and evaluator.task is not None
            if evaluator.native and evaluator.task is not None:
                evaluator.task.cancel()
            else:
                evaluator.scope.cancel()
            with move_on_after(1.0):
                await evaluator.done.wait()
            if not evaluator.done.is_set():
                self.world.fault("an evaluation that is cancelled goes on")
            self.fired["cancel an evaluation"] += 1
        self._reap()

    async def do_late(self) -> None:
        """Tokens that come after their request is over are not taken."""
        over = [request for request in self.world.requests if request.over]
        for request in over[-3:]:
            if request.commit([5], [-1.0], 0) != 0:
                self.world.fault("I10: tokens of a request that is over were taken")
            self.fired["late tokens"] += 1
            request.attempt.finish("stop")

    async def do_commit(self, which: int) -> None:
        """Commits a batch."""
        batches = self.world.batches
        if not batches:
            return
        batch = batches[which % len(batches)]
        self.engine.commit(batch)
        if batch not in self.world.again:
            self.world.trained.add(batch.index)
        self.fired["commit"] += 1

    async def do_save(self, state: str | None) -> None:
        """Takes a checkpoint, as soon as a group is in a state."""
        if state is not None:
            if self.consumer is None:
                await self.do_ask(self.setting.batch_size, True)
            await self._until_met(state)
        self._save()

    def _save(self) -> None:
        self.check()
        for state in self._states() or {"nothing"}:
            self.fired[f"SAVE met a group: {state}"] += 1
        if self.pauser is not None:
            self.fired[f"save in a pause that is {self.pauser.phase}"] += 1
        self.saved = SavedRun.of(self.engine, self.world)
        self.fired["save"] += 1

    async def do_restore(self, trained: int | None, at_once: bool) -> None:
        """Another engine goes on from the last checkpoint, or from one that is taken at once."""
        if self.saved is None or at_once:
            self._save()
        self.replacing = trained
        self.fired["restore"] += 1
        raise Replaced

    async def do_afterwards(self) -> None:
        """A pause that is over changes nothing any more."""
        if self.last_pause is None or (self.pauser and self.pauser.phase == "body"):
            return
        await self._expect(EngineBusy, self.last_pause.update_weights({}))
        self.fired["update outside a pause: refused"] += 1

    # The tasks of their own

    async def _consume(self, consumer: _Consumer, wait_in_pause: bool) -> None:
        if self.backend == "asyncio":
            consumer.task = asyncio.current_task()
        consumer.begun.set()
        try:
            with consumer.scope:
                batch = await self.engine.next_batch(consumer.n, wait_in_pause=wait_in_pause)
                consumer.batch = batch
                self.world.received(batch, consumer.n)
                self.fired["receive a batch"] += 1
        except RollnestError as error:
            consumer.error = error
        except Exception as error:
            self.world.fault(f"next_batch() raised {error!r}")
        except asyncio.CancelledError:
            if not consumer.native:
                raise
        finally:
            consumer.done.set()

    async def _evaluate(self, evaluator: _Evaluator, group_size: int) -> None:
        if self.backend == "asyncio":
            evaluator.task = asyncio.current_task()
        evaluator.begun.set()
        plan = evolve(self.setting.plans[0], group_size=group_size, redundancy=0)
        spec = self.world.begin_evaluation(plan)
        try:
            with evaluator.scope:
                evaluator.result = await self.engine.evaluate(
                    spec,
                    limit=evaluator.limit,
                    on_update=evaluator.on_update,
                    patience=_PATIENCE,
                )
        except RollnestError as error:
            evaluator.error = error
        except Exception as error:
            self.world.fault(f"evaluate() raised {error!r}")
        except asyncio.CancelledError:
            if not evaluator.native:
                raise
        finally:
            evaluator.done.set()

    async def _paused(self, pauser: _Pauser) -> None:
        if self.backend == "asyncio":
            pauser.task = asyncio.current_task()
        if pauser.when is not None:
            await self._until_met(pauser.when)
        pauser.begun.set()  # nothing comes between this and the pause
        world, started = self.world, current_time()
        pauser.excused = world.mood.pause in ("hangs", "fails")
        bound = pauser.grace + 2.0 + _TICK
        if self.evaluator is not None:
            bound += _PATIENCE
        world.evicting = pauser.mode is PauseMode.EVICT
        try:
            with pauser.scope:
                async with self.engine.paused(pauser.mode, grace=pauser.grace) as pauser.pause:
                    if current_time() - started > bound:
                        world.fault(f"the pause took {current_time() - started} s")
                    if self._unfrozen() or not self.server.is_paused:
                        world.fault("I10: the block was entered without a confirmation")
                    world.block_on = True
                    self.last_pause = pauser.pause
                    pauser.move("body")
                    try:
                        await pauser.release.wait()
                        if pauser.exit == "error":
                            raise Boom
                    finally:
                        world.block_on = False
                        pauser.move("leaving")
        except Exception as error:
            pauser.error = error
            if current_time() - started > bound and pauser.phase == "closing":
                world.fault(f"the pause failed after {current_time() - started} s")
        except asyncio.CancelledError:
            if not pauser.native:
                raise
        finally:
            pauser.move("done")

    # Helpers

    def _reap(self) -> None:
        """Takes in what tasks that have ended brought."""
        consumer, pauser, evaluator = self.consumer, self.pauser, self.evaluator
        if evaluator is not None and evaluator.done.is_set():
            self.evaluator = None
            self._check_evaluation(evaluator)
        if consumer is not None and consumer.done.is_set():
            self.consumer = None
            self._check_refusal(consumer)
        if pauser is not None and pauser.phase == "done":
            self.pauser = None
            self._check_pause(pauser)

    def _check_refusal(self, consumer: _Consumer) -> None:
        world, engine = self.world, self.engine
        match consumer.error:
            case None:
                return
            case EndOfPrompts():
                for name, task in engine.statistics().tasks.items():
                    plan = world.plans[name]
                    left = plan.epochs is None or task.drawn < plan.epochs * plan.prompts
                    if plan.weight and (left or task.ready or task.flight or task.waiting):
                        world.fault(f"EndOfPrompts, and {name} has {task}")
            case Starved() as error:
                if sum(error.reasons.values()) < world.plans[error.task].starve_after:
                    world.fault(f"Starved after {error.reasons}")
            case EngineBusy() as error:
                if error.ready is None or error.asked != consumer.n or error.ready >= consumer.n:
                    world.fault(f"EngineBusy with {error.ready} of {error.asked}")
            case EngineClosed() if world.leaving:
                pass
            case EngineBroken() if self.broken:
                pass
            case error:
                world.fault(f"next_batch() raised {error!r}")
        self.fired[f"no batch: {type(consumer.error).__name__}"] += 1

    def _check_evaluation(self, evaluator: _Evaluator) -> None:
        world = self.world
        match evaluator.error:
            case None:
                pass
            case EvaluationCancelled() if evaluator.on_update == "cancel":
                pass
            case EngineBroken() | EngineClosed() if self.broken or world.leaving:
                pass
            case error:
                world.fault(f"evaluate() raised {error!r}")
        if evaluator.error is not None:
            self.fired[f"no evaluation: {type(evaluator.error).__name__}"] += 1
        if evaluator.result is not None:
            prompts = self.setting.plans[0].prompts
            world.evaluated(evaluator.result, min(prompts, evaluator.limit or prompts))
            self.fired["evaluate"] += 1

    def _check_pause(self, pauser: _Pauser) -> None:
        world = self.world
        if pauser.error is not None:
            self.fired[f"a pause raised: {type(pauser.error).__name__}"] += 1
        match pauser.error:
            case None | Boom():
                pass
            case PauseFailed() if pauser.excused:
                pass
            case EngineBroken() | EngineClosed() if self.broken or world.leaving:
                pass
            case error:
                world.fault(f"paused() raised {error!r}")
        if self.broken or ("exit", 0) in self.server.log:
            return  # nothing goes on
        calls = [call[0] for call in self.server.log if call[0] in ("pause", "resume")]
        if world.gate_closed or self.server.is_paused or (calls and calls[-1] != "resume"):
            world.fault(f"production does not go on after a pause: {calls[-2:]}")

    def _unfrozen(self) -> bool:
        """Whether requests are at the server that may not be there in a pause of this mode."""
        kept = self.pauser is not None and self.pauser.mode is PauseMode.KEEP
        return bool(self.server.open) and not kept

    def _meet(self) -> None:
        """Counts which states of groups the pause meets as the gate closes."""
        if self.pauser is None:
            return
        for state in self._states() or {"nothing"}:
            self.fired[f"{self.pauser.mode.name} met a group: {state}"] += 1

    async def _until_met(self, state: str) -> None:
        """Waits until a group is in a state: for some steps, then for some time."""
        for seconds in [0.0] * 25 + [0.05, 0.1, 0.3] * 5:
            if state in self._states():
                return
            await sleep(seconds)

    def _states(self) -> set[str]:
        """The states that groups are in now."""
        statistics = self.engine.statistics()
        met: set[str] = set()
        for (task, _, _), track in self.world.tracks.items():
            if task not in self.world.visits:
                continue
            if track.where == "turn":
                open_ = any(not r.over for s in track.strands if s.asked for r in s.asked.requests)
                met.add("in a turn" if open_ else "at the gate")
            elif track.where in ("tool", "judge"):
                met.add(f"in a {track.where}")
        begun = sum(
            v.state == "flight" for visits in self.world.visits.values() for v in visits.values()
        )
        if statistics.total("flight") > begun:
            met.add("drawn")
        for state in ("ready", "waiting"):
            if statistics.total(state):
                met.add(state)
        return met

    async def _in_body(self) -> _Pauser | None:
        """The pause that is on, if one comes about."""
        if self.pauser is not None and self.pauser.release.is_set():
            await self.do_end_pause("normal", True)
        if self.pauser is None:
            await self.do_pause(0.2, 0)
        pauser = self.pauser
        if pauser is None:
            return None
        if pauser.phase == "closing":
            if self.world.mood.pause in ("hangs", "fails"):
                pauser.excused = True
            await self._until(pauser, "body")
        if pauser.phase == "body":
            return pauser
        self._reap()
        return None

    async def _until(self, pauser: _Pauser, phase: str) -> None:
        with move_on_after(pauser.grace + 10.0):
            while pauser.phase not in (phase, "done"):
                await pauser.moved.wait()
        if pauser.phase not in (phase, "done"):
            raise AssertionError(f"the pause is still {pauser.phase}")

    async def _expect(self, kind: type[Exception], call: Awaitable[object]) -> None:
        try:
            with fail_after(10.0):
                await call
        except kind:
            return
        except Exception as error:
            self.world.fault(f"{kind.__name__} was to be raised, not {error!r}")
        else:
            self.world.fault(f"{kind.__name__} was to be raised, and nothing was")


async def _enter(engine: Engine) -> None:
    async with engine.paused():
        pass


async def _slowly() -> None:
    await sleep(1.0)


# What is drawn


def _steps() -> list[Step]:
    """Every concrete step; more often drawn, more often listed."""
    moods: Mapping[str, Sequence[object]] = {
        "per_token": (0.0, 0.0, 0.02, 0.5, 5.0),
        "stream": (True, True, False),
        "labelled": (False, False),
        "admission": (0.0, 0.04, 0.3),
        "linger": (0.0, 0.1, 1.0),
        "deaf": (1, 3, -1, -1),
        "abort": (0.02, 0.3, None),
        "often": (0.2, 1.0),
        "pause": ("slow", "hangs", "fails"),
        "judge": ("slow", "slow", "slower", "fails", "quits", "nan", "none", "text"),
        "down": (True,) * 4,
        "fault": FAULTS,
    }
    table: list[tuple[int, str, Sequence[tuple[Any, ...]]]] = [
        (2, "ticks", [(1,), (2,), (3,), (5,), (8,), (13,)]),
        (6, "pass", [(0.01,), (0.1,), (0.3,), (1.0,), (3.0,), (20.0,), (100.0,)]),
        (4, "ask", [(1, False), (2, False), (2, True), (3, True)]),
        (5, "wait", [(0.3,), (30.0,)]),
        (16, "take", [(1,), (2,)]),
        (3, "cancel_ask", [(n, t) for n in (False, True) for t in (0, 1, 2, 3, 5)]),
        (
            1,
            "pause",
            [
                (grace, ticks, mode)
                for grace, ticks in ((0.0, 0), (0.0, 12), (0.05, 3), (0.3, 0), (1.0, 3), (5.0, 0))
                for mode in MODES
            ],
        ),
        (
            1,
            "break_off",
            [
                (1.0, ticks, seconds, how, mode)
                for ticks, seconds in ((0, 0.0), (1, 0.0), (3, 0.0), (6, 0.0), (0, 0.2))
                for how in ("cancel", "native", "error")
                for mode in MODES
            ],
        ),
        (1, "pounce", [(state, mode) for state in STATES for mode in MODES]),
        (2, "pounce", [("drawn", mode) for mode in MODES]),
        (7, "enter", [()]),
        (
            4,
            "end_pause",
            [(how, w) for how in ("normal", "error", "cancel", "native") for w in (False, True)],
        ),
        (
            1,
            "update",
            [
                (kind, stay)
                for kind in ("dict", "callable", "jump", "published", "falling", "old", "new")
                for stay in (False, False, True)
            ],
        ),
        (
            1,
            "cycle",
            [
                (kind, grace, mode)
                for kind in ("dict", "jump", "published", "new")
                for grace in (0.0, 0.2)
                for mode in MODES
            ],
        ),
        (
            1,
            "evaluate",
            [(u, n, g) for u in ("wait", "cancel", "mark") for n in (1, None) for g in (1, 2)],
        ),
        (6, "await_evaluation", [(3.0,), (100.0,)]),
        (3, "cancel_evaluation", [(n, t) for n in (False, True) for t in (0, 3)]),
        (8, "late", [()]),
        (16, "commit", [(0,), (-1,)]),
        (3, "save", [(state,) for state in (None, None, None, *STATES)]),
        (4, "restore", [(k, now) for k in (None, 0, 1000) for now in (False, True)]),
        (20, "afterwards", [()]),
        (24, "calm", [()]),
        (1, "mood", [(aspect, v) for aspect, values in moods.items() for v in values]),
    ]
    return [
        Step(rule, arguments)
        for often, rule, rows in table
        for arguments in rows
        for _ in range(often)
    ]


RULES: Sequence[Step] = _steps()

_plans = st.builds(
    Plan,
    loops=st.sampled_from(
        [
            ("one",),
            ("turns",),
            ("fork",),
            ("tools",),
            ("hasty", "one"),
            ("stubborn",),
            ("odd", "one", "one"),
            ("turns", "tools", "one"),
            ("fork", "hasty"),
            ("threads", "one"),
        ]
    ),
    judger=st.sampled_from(["async"] * 6 + ["none", "sync"]),
    group_size=st.integers(1, 3),
    strategy=st.sampled_from(
        [
            SyncStrategy(),
            SyncStrategy(max_staleness=1),
            AsyncStrategy(),
            AsyncStrategy(max_staleness=2),
            AsyncStrategy(max_staleness=0, lead=1),
            AsyncStrategy(max_staleness=1, lead=2),
            AsyncStrategy(max_staleness=2, lead=0.5),
            AsyncStrategy(max_staleness=1, oversample=1.0, expired="tail", tail_batch=2),
            AsyncStrategy(max_staleness=0, lead=1, expired="tail", tail_batch=3),
            AsyncStrategy(max_staleness=1, lead=2, expired="drop", order="freshest"),
            AsyncStrategy(max_staleness=2, lead=1, partial=False),
            AsyncStrategy(max_staleness=2, lead=2, max_token_lag=1),
            AsyncStrategy(max_staleness=1, lead=2, max_token_lag=0, expired="drop"),
        ]
    ),
    weight=st.sampled_from([1.0, 1.0, 2.5, 0.0]),
    epochs=st.sampled_from([None] * 4 + [1, 2]),
    prompts=st.integers(2, 6),
    max_tokens=st.sampled_from([6, 1, 3, 9]),
    min_tokens=st.sampled_from([0, 0, 2]),
    max_response_tokens=st.sampled_from([None, 12, 7, 4]),
    max_context=st.sampled_from([None, None, 16, 8]),
    limits=st.sampled_from(
        [
            Limits(tool=3.0, judge=20.0),
            Limits(tool=3.0, judge=20.0, turn=2.0),
            Limits(tool=None, judge=None, sample=4.0),
        ]
    ),
    starve_after=st.sampled_from([4, 2, 10]),
    redundancy=st.sampled_from([0, 0, 0, 1, 2]),
    failures=st.sampled_from(
        [
            FailurePolicy(max_failures_in_a_row=None),
            FailurePolicy(max_failures_in_a_row=None),
            FailurePolicy(on_dead_member="retry", max_failures_in_a_row=None),
            FailurePolicy(on_dead_member="shrink", min_members=1, max_failures_in_a_row=None),
            FailurePolicy(on_dead_member="shrink", max_failures_in_a_row=None),
        ]
    ),
)


def _no_task_off(plans: list[Plan]) -> tuple[Plan, ...]:
    if not any(plan.weight for plan in plans):
        plans[0] = evolve(plans[0], weight=1.0)
    return tuple(plans)


_moods = st.builds(
    Mood,
    per_token=st.sampled_from([0.1, 0.1, 0.0, 0.02, 1.0, 4.0]),
    stream=st.booleans(),
    labelled=st.booleans(),
    linger=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    deaf=st.sampled_from([0, 0, 0, 1, -1]),
    fault=st.sampled_from([None] * len(FAULTS) + list(FAULTS)),
    often=st.sampled_from([0.2, 0.5]),
    judge=st.sampled_from(["ok", "ok", "ok", "slow", "slow", "slower", "fails", "quits", "nan"]),
)

_settings = st.builds(
    Setting,
    plans=st.lists(_plans, min_size=1, max_size=3).map(_no_task_off),
    batch_size=st.integers(1, 3),
    publish_every=st.sampled_from([1, 1, 3]),
    capacity=st.builds(
        Capacity,
        turns=st.sampled_from([512, 1, 2, 3]),
        judges=st.sampled_from([32, 1, 2]),
        tools=st.sampled_from([64, 1]),
    ),
    seed=st.integers(0, 2**20),
    mood=_moods,
    end=st.sampled_from(ENDS),
)


def runs(steps: int) -> st.SearchStrategy[tuple[Setting, list[Step]]]:
    """Draws a setting and so many steps."""
    return st.tuples(_settings, st.lists(st.sampled_from(RULES), min_size=steps, max_size=steps))


def play(backend: str, setting: Setting, steps: Sequence[Step], fired: Counter[str]) -> None:
    """Plays one run on `"asyncio"` or `"trio"`.

    Raises:
        AssertionError: The engine and the model differ; the last steps are in its notes.
    """
    make: Callable[[], tuple[str, dict[str, Any]]]
    make = next(m for m in virtual_backends() if m()[0] == backend)
    name, options = make()
    machine: Machine | None = None

    async def main() -> None:
        nonlocal machine
        machine = Machine(setting, backend, fired)
        await machine.run(steps)

    logging.disable(logging.CRITICAL)
    try:
        anyio.run(main, backend=name, backend_options=options)
    except BaseException as error:
        if machine is not None:
            error.add_note(f"on {backend}, {setting}, steps {machine.trail}")
        raise
    finally:
        logging.disable(logging.NOTSET)
