"""A long run holds no more than a short one: containers, objects, traced memory; and its books balance.

Every container that can be reached from the engine is found by walking it, so one that is added later is found
too: it must be empty, or `BOUNDS` must say how large it may become, whatever the number of samples.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import tracemalloc
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from enum import Enum
from functools import partial
from inspect import isclass
from random import Random
from types import BuiltinFunctionType, CoroutineType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import anyio
import pytest
import sniffio
import trio
from anyio.lowlevel import checkpoint
from attrs import evolve

from rollnest import (
    AsyncStrategy,
    Batch,
    Capacity,
    Engine,
    Group,
    Limits,
    PauseMode,
    Prompt,
    Rollout,
    Sample,
    Sampling,
    Status,
    TaskSpec,
)
from rollnest.abc import Attempt, Instrument
from rollnest.errors import InferenceError, ToolError
from rollnest.testing import Reply, ScriptedController, assert_conserved

pytestmark = pytest.mark.anyio

GROUP = 8
BATCH = 20  # groups
TASKS = 5
LIVE = (
    3 * BATCH
)  # groups in flight or ready, all tasks together: a lead, an oversample, each rounded up
TURNS = 256
REASONS = ("loop", "inference", "judge", "filtered")

BOUNDS: Mapping[str, int] = {
    # One entry for each task, drop reason, hook, sampling field, prompt of an epoch.
    "Admission._applicants": TASKS,
    "Admission._passes": TASKS,
    "Admission._strides": TASKS,
    "Allocation._owed": TASKS,
    "Allocation._weights": TASKS,
    "Delivery._before": TASKS,
    "Delivery._tables": TASKS,
    "Eviction._runners": TASKS,
    "Shares.groups": TASKS,
    "Shares.owed": TASKS,
    "Parts.counters": TASKS,
    # Until the next request works: the last errors, and failed requests to probe with.
    "Outage._errors": 5,
    "Outage._suspects": 16,
    "Parts.producers": TASKS,
    "_parts.assemble.<locals>.judging_of:services_of": TASKS,
    "GroupTable.dropped": 8,
    "GroupTable.failures": 8,
    "GroupTable.shrunk": 65,
    "FailureStreak._kinds": 8,
    "FailureStreak._last": 3,
    "GroupTable.dropped_in_a_row": 8,
    "GroupTable.failures_in_a_row": 8,
    "Delivery._before[][]": 8,  # reasons
    "Instruments._listeners": 32,
    "Instruments._listeners[]": 1,
    "Capabilities.sampling": 8,
    "Capabilities.pause_modes": 2,
    "Capabilities.release_tags": 2,
    "RolloutServices.stop_token_ids": 1,
    "Sampler._order": 40,
    # Batches that were not committed: the last one.
    "Delivery.uncommitted": 1,
    # Groups that are ready, wait, or are in flight.
    "ReplayBuffer._by_version": LIVE,
    "_Rows.rows": LIVE,
    "_Rows.visits": LIVE,
    "ReplayBuffer._held": LIVE,
    "ReplayBuffer._expired": LIVE,
    "ReplayBuffer._cut": LIVE,
    "GroupTable.flight": LIVE,
    "GroupRunner.live": LIVE,
    # Members of one group, and what each holds.
    "Members.rollouts": GROUP,
    "Members.samples": GROUP,
    "Members.unjudged": GROUP,
    "Members._indexes": GROUP,
    "Members._missing": GROUP,
    "Members._prompt_ids": 64,
    "Members.run:rollouts": GROUP,
    "Members.run:unjudged": GROUP,
    "GroupFigures.ages": GROUP,
    "GroupFigures.ages[]": 2,
    "Row.kept": GROUP,
    "Row.unjudged": GROUP,
    "GroupJudging._own": 1,
    "RolloutCore.contexts": 2,
    "RolloutCore.turns": 3,
    "RolloutCore.asked": 3,
    # Calls of tools in one rollout, and the tasks that made them.
    "CallLog.calls": 2,
    "CallLog._strands": 2,
    # What members that were cut have left behind, and what is left of it while they run again.
    "Members.journals": GROUP,
    "Members._left": GROUP,
    "Row.journals": GROUP,
    "RecordedContext.prompt_ids": 64,
    "ContextReplay.prompt_ids": 64,
    "ContextReplay.turns": 3,
    "Replay.contexts": 2,
    "Replay._opened": 2,
    "Replay._strands": 2,
    "Replay._strands[]": 2,
    # Turns at the server and limits that run: a turn, a tool or judger call, a sample.
    "Gate._in_flight": TURNS,
    "Gate._limits": 2 * LIVE * GROUP,
    "Slots._waiting": LIVE * GROUP,
    "Slots.calls": LIVE * GROUP,
    "Workers.abandoned": LIVE * GROUP,
    # Tokens of a context: what the policy's 64 hold.
    "Attempt.prompt_ids": 64,
    "Context._prompt_ids": 64,
    "Response._ids": 64,
    "Response._logprobs": 64,
    # What anyio, asyncio and trio keep for each task, scope and waiter.
    "event loop": 2 * LIVE * GROUP,
}
"""Most items of each container that may hold any: `Class.attribute`, and `[]` for a container in a container."""

CONTAINERS = (dict, list, set, frozenset, deque, array, bytearray)

LOOPS = ("anyio", "asyncio", "trio", "outcome", "sortedcontainers")

UPWARDS = {"._parent_scope", "._parent_task", "._parent_nursery", "._parent"}
"""From a scope or task to what it stands in: not the engine's, so not followed."""


class Found(NamedTuple):
    name: str
    size: int
    position: int


class Walk:
    """Everything that can be reached from an object; classes, modules, event loops and `others` are left out."""

    def __init__(self, root: object, name: str, others: Sequence[object]) -> None:
        self.containers: list[Found] = []
        self.objects: Counter[str] = Counter()
        self._steps: list[tuple[str, int]] = []  # from where, and how
        kept: list[object] = []  # ids stay valid as long as the objects live
        seen = {id(other) for other in others} | {id(self), id(self.__dict__)}
        todo: deque[tuple[str, str, int, object]] = deque([(name, name, -1, root)])
        while todo:
            name, step, parent, thing = todo.popleft()
            if id(thing) in seen or _is_foreign(thing):
                continue
            seen.add(id(thing))
            position = len(kept)
            kept.append(thing)
            self._steps.append((step, parent))
            self.objects[type(thing).__name__] += 1
            if isinstance(thing, CONTAINERS):
                self.containers.append(Found(name, len(thing), position))
            for child_name, step, child in _children(thing, name):
                todo.append((child_name, step, position, child))

    @property
    def unbounded(self) -> dict[str, str]:
        """Containers that hold more than `BOUNDS` allows, with their sizes and paths."""
        return {
            found.name: f"{found.size} > {BOUNDS.get(found.name, 0)} at {self._path(found.position)}"
            for found in self.containers
            if found.size > BOUNDS.get(found.name, 0)
        }

    def _path(self, position: int) -> str:
        steps: list[str] = []
        while position >= 0:
            step, position = self._steps[position]
            steps.append(step)
        return "".join(reversed(steps))


def _name_of(owner: type, attribute: str) -> str:
    library = owner.__module__.partition(".")[0].lstrip("_")
    return "event loop" if library in LOOPS else f"{owner.__name__}.{attribute}"


def _is_ours(coroutine: CoroutineType[Any, Any, Any]) -> bool:
    if coroutine.cr_frame is None:
        return False
    module = str(coroutine.cr_frame.f_globals["__name__"])
    return module.startswith("rollnest.") and not module.startswith("rollnest.testing")


def _is_foreign(thing: object) -> bool:
    if isclass(thing) or isinstance(
        thing,
        ModuleType | BuiltinFunctionType | str | bytes | int | float | bool | Enum | Context | None,
    ):
        return True
    module = type(thing).__module__
    return (
        isinstance(thing, asyncio.AbstractEventLoop)
        or (module.startswith("trio.") and type(thing).__name__ in ("Runner", "SystemClock"))
        or module == "rollnest._records"  # frozen: what holds them is bounded, so they are
        or module == __name__
        or module.startswith("rollnest.testing")  # the policy's server: the user's own
        or (isinstance(thing, FunctionType) and not thing.__module__.startswith("rollnest"))
    )


def _children(thing: object, name: str) -> Iterator[tuple[str, str, object]]:
    """What an object refers to, with names as far as they are known."""
    known: set[int] = set()
    if isinstance(thing, CoroutineType):
        if not _is_ours(thing):
            yield "", ".cr_await", thing.cr_await
            return
        frame: Any = thing.cr_frame
        known |= {id(frame), id(frame.f_locals)}  # made by looking
    for child_name, step, child in _named(thing, name):
        known.add(id(child))
        if step not in UPWARDS:
            yield child_name, step, child
    if isinstance(thing, FunctionType | memoryview):
        return  # besides its closure, a function refers to its module only
    known.add(id(getattr(thing, "__dict__", None)))
    for child in gc.get_referents(thing):
        if id(child) not in known:
            yield _name_of(type(thing), "?"), f".?{type(child).__name__}", child


def _named(thing: object, name: str) -> Iterator[tuple[str, str, object]]:
    if isinstance(thing, dict):
        for key, value in thing.items():
            step = f"[{key!r}]" if isinstance(key, str) else "[]"
            yield f"{name}[]", step, value
            yield f"{name}[]", "[key]", key
    elif isinstance(thing, list | set | frozenset | deque | tuple):
        yield from ((f"{name}[]", "[]", item) for item in thing)
    elif isinstance(thing, MethodType):
        yield "", ".__self__", thing.__self__
    elif isinstance(thing, FunctionType):
        where = f"{thing.__module__.rpartition('.')[2]}.{thing.__qualname__}"
        for variable, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            with suppress(ValueError):  # not bound yet
                yield f"{where}:{variable}", f".<{variable}>", cell.cell_contents
        yield f"{where}:attributes", ".__dict__", thing.__dict__
    elif isinstance(thing, partial):
        yield "partial.func", ".func", thing.func
        yield "partial.args", ".args", thing.args
        yield "partial.keywords", ".keywords", thing.keywords
    elif isinstance(thing, memoryview):
        yield name, ".obj", thing.obj
    elif isinstance(thing, CoroutineType):
        frame: Any = thing.cr_frame
        for variable, value in frame.f_locals.items():
            yield f"{thing.__qualname__}:{variable}", f".<{variable}>", value
        yield "", ".cr_await", thing.cr_await
    else:
        for attribute, value in getattr(thing, "__dict__", {}).items():
            yield _name_of(type(thing), attribute), f".{attribute}", value
        for base in type(thing).__mro__:
            for slot in vars(base).get("__slots__", ()):
                mangled = f"_{base.__name__.lstrip('_')}{slot}" if slot.startswith("__") else slot
                with suppress(AttributeError):
                    yield _name_of(type(thing), slot), f".{slot}", getattr(thing, mangled)


# The run: a bit of everything


class Quick(ScriptedController):
    """Answers most attempts at once; a few late, so that a pause cuts them; a few not at all."""

    def __init__(self, seed: int) -> None:
        super().__init__(self._late, vocab_size=100, max_context=64, stream=True)
        self._chance = Random(seed)
        self.asked = 0

    async def generate(self, attempt: Attempt) -> None:
        self.asked += 1
        if self.asked % 40:
            self.sampled += 2
            self.committed += attempt.commit([5, 0], [-0.5, -0.5])
            attempt.finish("stop")
            return
        try:
            await super().generate(attempt)
        finally:
            self.log.clear()  # a record of everything that was asked: the kit's own, and meant to grow
            self.prompts.clear()

    def _late(self, attempt: Attempt) -> Reply:
        match self._chance.randrange(40):
            case 0:
                return Reply([7], error=InferenceError("500", retryable=True), delay=0.1)
            case 2:
                return Reply([7], error=InferenceError("400"), delay=0.1)
            case 1:
                return Reply([7] * 4, delay=50.0)  # over the limit of a turn
            case _:
                return Reply([7, 8, 9, 0], delay=self._chance.choice((0.5, 2.0, 4.0)))


class Heard(Instrument):
    """Counts what it hears and keeps nothing."""

    def __init__(self) -> None:
        self.heard: Counter[str] = Counter()

    def sample_ended(self, sample: Sample) -> None:
        self.heard[sample.status.name] += 1

    def group_ended(self, group: Group, outcome: str) -> None:
        self.heard[outcome] += 1


async def judged(sample: Sample) -> dict[str, float]:
    return {"score": float(sample.index % 2)}


async def judged_late(sample: Sample) -> float:
    await checkpoint()
    if sample.visit % 37 == 5 and not sample.index:
        await anyio.sleep(100.0)  # over the limit of a judger
    return float(sample.index % 3)


def judged_in_a_thread(sample: Sample) -> float:
    return 1.0


def half(group: Group) -> bool:
    return group.visit % 2 == 0


async def look_up(key: int) -> int:
    await checkpoint()
    if key % 50 == 0:
        raise KeyError(key)
    return key


async def with_tools(rollout: Rollout) -> None:
    await rollout.generate(max_tokens=4)
    with suppress(ToolError):
        await rollout.tool(look_up, rollout.random.randrange(100))
    rollout.append([3, 4])
    await rollout.generate(max_tokens=4)
    other = rollout.segment([9, 9])
    await other.generate(max_tokens=2)


async def that_fails(rollout: Rollout) -> None:
    await rollout.generate(max_tokens=2)
    number = int(rollout.uid.split("/")[2])
    if number % 11 == 0 and rollout.index == 0:
        raise RuntimeError("the environment crashed")
    if number % 53 == 0:
        rollout.fail("nothing to be learned here")


def tasks() -> list[TaskSpec]:
    prompts = [Prompt(f"p{i}", token_ids=[1 + i % 90, 2]) for i in range(40)]
    plain = TaskSpec(
        "plain",
        prompts,
        judger=None,  # most of the run is of this task: it has to be quick
        group_size=GROUP,
        sampling=Sampling(4),
        strategy=AsyncStrategy(max_staleness=1, oversample=0.5),
        weight=16,
    )
    limits = Limits(turn=20.0, judge=20.0, tool=20.0, sample=200.0)
    return [
        plain,
        evolve(plain, name="filtered", judger=judged, keep=half, weight=1),
        evolve(plain, name="failing", loop=that_fails, judger=judged_late, limits=limits, weight=1),
        evolve(plain, name="tools", loop=with_tools, judger=judged, limits=limits, weight=1),
        evolve(
            plain,
            name="old",
            judger=judged_in_a_thread,
            limits=limits,
            strategy=AsyncStrategy(max_staleness=0, lead=1),
            weight=1,
        ),
    ]


class Trainer:
    """Takes batches, publishes weights, and keeps figures only."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.batches = 0
        self.sums: Counter[str] = Counter()

    async def until(self, samples: int) -> None:
        while self.sums["samples"] < samples:
            self._add(await self.engine.next_batch())
            if self.batches % 4 == 0:
                mode = list(PauseMode)[self.batches // 4 % len(PauseMode)]
                async with self.engine.paused(mode, grace=1.0) as pause:
                    await pause.update_weights({})
            if self.batches % 20 == 0:
                result = await self.engine.evaluate("tools", limit=2)
                self.sums["evaluated"] += len(result.samples)

    def _add(self, batch: Batch) -> None:
        assert all(group.status is Status.COMPLETED for group in batch.groups)
        self.batches += 1
        figures = batch.statistics
        for name in ("groups", "samples", "policy_tokens", "expired", "produced_samples"):
            self.sums[name] += getattr(figures, name)
        self.sums.update({f"dropped {reason}": n for reason, n in figures.dropped.items()})
        self.sums.update({f"lag {lag}": n for lag, n in figures.lag_histogram.items()})


class Run:
    """An engine's run, looked at now and then."""

    def __init__(self, seed: int) -> None:
        self.controller, self.heard = Quick(seed), Heard()
        self.engine = Engine(
            self.controller,
            tasks(),
            batch_size=BATCH,
            capacity=Capacity(turns=TURNS),
            instruments=[self.heard],
        )
        self.trainer = Trainer(self.engine)

    def walk(self) -> Walk:
        task: object = (
            trio.lowlevel.current_task()
            if sniffio.current_async_library() == "trio"
            else asyncio.current_task()
        )
        return Walk(self.engine, "engine", [task, self.controller, self.heard, self.trainer, self])

    async def to(self, samples: int) -> tuple[Walk, int]:
        """Goes on until so many samples were delivered, and looks.

        Returns:
            What can be reached once everything is at rest, and the traced memory.
        """
        await self.trainer.until(samples)
        assert self.walk().unbounded == {}
        await anyio.sleep(1000.0)  # whatever is in flight gets ready
        walk = self.walk()
        assert walk.unbounded == {}
        assert self.engine.statistics().total("flight") == 0
        self.check_books()
        gc.collect()
        return walk, tracemalloc.get_traced_memory()[0]

    def check_books(self) -> None:
        engine, sums, heard = self.engine, self.trainer.sums, self.heard.heard
        assert_conserved(engine, committed=self.controller.committed)
        figures = engine.statistics()
        assert figures.total("delivered") == sums["groups"] == self.trainer.batches * BATCH
        assert sums["samples"] == sums["groups"] * GROUP
        assert figures.total("produced_samples") == heard["COMPLETED"]
        for task in figures.tasks.values():
            assert task.ready <= LIVE
        for reason in REASONS:
            # A batch's figures are differences, so they lag behind by what happened since.
            now = sum(task.dropped.get(reason, 0) for task in figures.tasks.values())
            assert now == heard[reason] >= sums[f"dropped {reason}"]
        assert figures.total("expired") >= sums["expired"]

    def check_mixed(self) -> None:
        """The run had something of everything."""
        sums = self.trainer.sums
        wanted = [
            "lag 0",
            "lag 1",
            "expired",
            "evaluated",
            *(f"dropped {reason}" for reason in REASONS),
        ]
        assert all(sums[name] > 0 for name in wanted), sums


@pytest.fixture
def traced() -> Iterator[None]:
    # Tracing makes everything several times slower: a minute, or longer than pytest's own limit on a busy machine.
    faulthandler.dump_traceback_later(1200, exit=True)
    gc.collect()
    gc.freeze()  # what other tests have loaded need not be looked at again and again
    tracemalloc.start(1)
    yield
    tracemalloc.stop()
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
async def test_a_long_run_holds_no_more_than_a_short_one(anyio_backend_name: str) -> None:
    run = Run(seed=3)
    async with run.engine:
        _, level = await run.to(1_000)
        walk, _ = await run.to(10_000)
        if anyio_backend_name == "asyncio":  # once is enough: the engine's code is the same
            longer, _ = await run.to(100_000)
            # Ready rows stand in two lists for each version, and of the members of each row there is one tuple for each
            # version that is the oldest of some. How many versions there are varies.
            more, fewer = longer.objects - walk.objects, walk.objects - longer.objects
            differing = more + fewer
            assert differing.pop("_Rows", 0) <= 4, (more, fewer)
            assert differing.pop("list", 0) <= 8, (more, fewer)
            assert differing.pop("tuple", 0) <= 4, (more, fewer)
            assert not differing, (more, fewer)
            walk = longer
        run.check_mixed()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - level < 1_000_000, walk.objects.most_common(20)


async def test_the_walk_finds_what_has_no_bound() -> None:
    run = Run(seed=4)
    async with run.engine:
        await run.to(1_000)
        producer = next(iter(run.engine._usable().producers.values()))
        leaky: Any = producer.runner
        leaky.history = [1, 2]
        assert list(run.walk().unbounded) == ["GroupRunner.history"]
        leaky.history = []
        leaky.listeners = {"a": [deque([1])]}
        assert set(run.walk().unbounded) == {"GroupRunner.listeners" + "[]" * n for n in range(3)}
        del leaky.listeners
        held = deque([1])

        def keeps(what: object) -> object:
            return lambda: what

        keeps.__module__ = "rollnest"
        leaky.hook = keeps(held)
        assert run.walk().unbounded == {}  # a function of the test's own
        leaky.hook.__module__ = "rollnest._group"
        assert [name for name in run.walk().unbounded if name.endswith(":what")]
