"""A pool is cancelled at every scheduler step: whatever it was doing, nothing is left, and it works afterwards.

Two ways: the task that holds the engine, in several states of the pool; and one call of a pool that stays.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal

import anyio
import pytest
from anyio import create_task_group, fail_after, sleep

from rollnest import AsyncStrategy, Attempt, Engine, PauseMode, Sample, Sampling, Status
from rollnest.errors import InferenceError, WeightsState
from rollnest.testing import (
    ScriptedController,
    act_at_steps,
    assert_conserved,
    cancel_at_step,
    check_sample,
)
from rollnest_adapters.pool import ControllerPool, PoolUpdateFailed

from .helpers import prompts, spec

Backend = Literal["asyncio", "trio"]
Servers = dict[str, ScriptedController]
State = Callable[[Engine, ControllerPool, Servers], Awaitable[object]]

WAYS: list[tuple[Backend, bool]] = [("asyncio", False), ("asyncio", True), ("trio", False)]
pytestmark = pytest.mark.slow
every_way = pytest.mark.parametrize(
    ("backend", "native"), WAYS, ids=["asyncio", "asyncio-native", "trio"]
)


def new_servers(names: str = "ab") -> Servers:
    return {name: ScriptedController(rate=10.0, stop_every=10**9, stream=True) for name in names}


def told(
    capsys: pytest.CaptureFixture[str], what: str, backend: str, native: bool, steps: int
) -> None:
    with capsys.disabled():
        way = f"{backend}{' native' if native else ''}"
        sys.stdout.write(f"\n{what} on {way}: cancelled at each of {steps} steps ")


# The engine's task


async def producing(engine: Engine, pool: ControllerPool, servers: Servers) -> None:
    await engine.next_batch()
    await engine.next_batch()


async def dying(engine: Engine, pool: ControllerPool, servers: Servers) -> None:
    await sleep(0.25)
    servers["a"].crash()
    await engine.next_batch()
    servers["a"].restart()
    await sleep(1.5)
    await engine.next_batch()


async def dying_silently(engine: Engine, pool: ControllerPool, servers: Servers) -> None:
    await sleep(0.25)
    servers["a"].crash(silent=True)
    async with engine.paused(grace=0.5) as pause:
        await pause.update_weights({})
    await engine.next_batch()


def pausing(mode: PauseMode) -> State:
    async def paused(engine: Engine, pool: ControllerPool, servers: Servers) -> None:
        await sleep(0.25)
        async with engine.paused(mode) as pause:
            await pause.update_weights({})
        await engine.next_batch()

    paused.__name__ = f"paused with {mode.name}"
    return paused


async def given_weights(engine: Engine, pool: ControllerPool, servers: Servers) -> None:
    async with engine.paused() as pause:
        await pause.update_weights("/weights/1")
    servers["a"].crash()
    await sleep(3.0)
    servers["a"].restart()
    await sleep(3.0)
    await engine.next_batch()


async def released(engine: Engine, pool: ControllerPool, servers: Servers) -> None:
    await sleep(0.25)
    async with engine.paused(release=("kv", "weights")) as pause:
        await pause.reload("weights")
        await pause.update_weights({})
    await engine.next_batch()


async def joining_and_leaving(engine: Engine, pool: ControllerPool, servers: Servers) -> None:
    await sleep(0.25)
    servers["c"] = new_servers("c")["c"]
    await pool.join("c", servers["c"])
    await pool.leave("a", grace=0.1)
    await engine.next_batch()


STATES: list[State] = [
    producing,
    dying,
    dying_silently,
    given_weights,
    released,
    joining_and_leaving,
    *map(pausing, (PauseMode.ABORT, PauseMode.KEEP, PauseMode.EVICT)),
]
NATIVE = (
    dying,
    joining_and_leaving,
)  # the others are the engine's, which has such a test of its own
SWEEPS = [
    pytest.param(state, backend, native, id=f"{state.__name__}-{backend}{'-native' * native}")
    for state in STATES
    for backend, native in WAYS
    if not native or state in NATIVE
]


@pytest.mark.parametrize(("state", "backend", "native"), SWEEPS)
def test_the_engines_task_is_cancelled_at_every_step(
    state: State, backend: Backend, native: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    step = 0
    while True:
        step += 1
        servers = new_servers()
        pool = ControllerPool(servers, concurrency=2)
        task = spec(
            prompts=prompts(9), group_size=2, sampling=Sampling(5), strategy=AsyncStrategy(lead=0.5)
        )
        engine = Engine(pool, task, batch_size=2)
        entered = False

        async def operation() -> None:
            nonlocal entered
            async with engine:  # noqa: B023
                entered = True
                await state(engine, pool, servers)  # noqa: B023

        report = cancel_at_step(operation, step, backend=backend, native=native)
        where = f"step {step}: {report}, {pool}"
        assert report.tasks_left == 0, where
        assert report.threads_left == (), where
        for name, one in servers.items():
            assert not one.open, (where, name)
            entries = [entry for entry in one.log if entry[0] in ("enter", "exit")]
            assert entries in ([], [("enter",), ("exit", 0)]), (where, name, entries)
            assert one.while_paused == 0, (where, name)
            assert one.refused == [], (where, name)
        assert pool.servers == (), where
        if entered:
            assert_conserved(engine, committed=sum(one.committed for one in servers.values()))
            assert engine.statistics().total("flight") == 0, where
        if not report.cancelled:
            break
    told(capsys, state.__name__, backend, native, step - 1)
    assert step > 60


@pytest.mark.parametrize(
    ("mode", "silent"), [(PauseMode.ABORT, False), (PauseMode.KEEP, True)], ids=["reset", "silent"]
)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_server_dies_at_every_step(backend: Backend, mode: PauseMode, silent: bool) -> None:
    step = 0
    while True:
        step += 1
        servers = new_servers()
        pool = ControllerPool(servers, concurrency=3)
        task = spec(
            prompts=prompts(5), group_size=2, sampling=Sampling(5), strategy=AsyncStrategy(lead=0.5)
        )
        engine = Engine(pool, task, batch_size=2)
        samples: list[Sample] = []
        entered = False

        async def operation() -> None:
            nonlocal entered
            async with engine:  # noqa: B023
                entered = True
                await sleep(0.25)
                async with engine.paused(mode, grace=2.0) as pause:  # noqa: B023
                    try:
                        await pause.update_weights(_nothing)
                    except PoolUpdateFailed as error:  # it died in the middle of that
                        lost.update(error.servers)  # noqa: B023
                for _ in range(2):
                    samples.extend((await engine.next_batch()).samples)  # noqa: B023

        lost: dict[str, WeightsState] = {}

        def crash() -> None:
            if entered:  # noqa: B023  (else the pool does not open, which is another test)
                servers["a"].crash(silent=silent)  # noqa: B023

        report = act_at_steps(operation, {step: crash}, backend=backend)
        where = f"step {step}: {report}"
        assert lost in ({}, {"a": WeightsState.UNKNOWN, "b": WeightsState.NEW}), where
        assert engine.version == 1, where
        assert len(samples) == 8, where
        assert len({sample.uid for sample in samples}) == 8, where
        assert all(sample.status is Status.COMPLETED for sample in samples), where
        for sample in samples:
            check_sample(sample)
        figures = engine.statistics()
        assert figures.outages == 0, where
        assert figures.tasks["task"].dropped == {}, where
        assert_conserved(engine, committed=sum(one.committed for one in servers.values()))
        assert report.tasks_left == 0, where
        assert all(not one.open for one in servers.values()), where
        if not report.acted:
            break
    assert step > 60


async def _nothing() -> None:
    """Weights that somebody else has moved, to whoever lives."""


# One call


def attempt(number: int = 0, max_tokens: int = 5) -> Attempt:
    return Attempt(
        [1 + number, 2], max_tokens=max_tokens, sampling=Sampling(max_tokens), affinity=str(number)
    )


async def generating(pool: ControllerPool, servers: Servers) -> None:
    await pool.generate(attempt(9))


async def generating_at_one_that_dies(pool: ControllerPool, servers: Servers) -> None:
    async with create_task_group() as tasks:

        async def generate() -> None:
            with suppress(InferenceError):
                await pool.generate(attempt(9))

        tasks.start_soon(generate)
        await sleep(0.15)
        for one in servers.values():
            if len(one.open) == 2:
                one.crash()
                break


async def pause_update_resume(pool: ControllerPool, servers: Servers) -> None:
    await pool.pause(PauseMode.ABORT)
    await pool.update_weights({}, 1)
    await pool.resume()


async def release_reload(pool: ControllerPool, servers: Servers) -> None:
    await pool.abort(None)
    await pool.pause(PauseMode.ABORT)
    await sleep(1.0)  # what was aborted ends
    await pool.release(["kv"])
    await pool.reload(["kv"])
    await pool.resume()


async def asking(pool: ControllerPool, servers: Servers) -> None:
    await pool.abort(None)
    await pool.version()
    await pool.health()


async def join(pool: ControllerPool, servers: Servers) -> None:
    servers["c"] = new_servers("c")["c"]
    await pool.join("c", servers["c"])


async def leave(pool: ControllerPool, servers: Servers) -> None:
    await pool.leave("b", grace=0.2)


Call = Callable[[ControllerPool, Servers], Awaitable[None]]


class Cancelled:
    """One call of a pool that has turns, cancelled before the k-th step; then the pool is used."""

    def __init__(self, call: Call, *, native: bool) -> None:
        self.servers = new_servers()
        self.pool = ControllerPool(self.servers, concurrency=2)
        self.native = native
        self.state: Literal["before", "running", "after"] = "before"
        self.too_late = False
        self._call = call
        self._cancel: Callable[[], object] | None = None

    def act(self) -> None:
        self.too_late = self.state == "after"
        if self.state == "running":
            assert self._cancel is not None
            self._cancel()

    async def run(self) -> None:
        async with self.pool:
            async with create_task_group() as tasks:
                for number in range(3):
                    tasks.start_soon(self._generate, number)
                await sleep(0.1)
                tasks.start_soon(self._run_call)
            await self._use()

    async def _run_call(self) -> None:
        with anyio.CancelScope() as scope:
            task = asyncio.current_task() if self.native else None
            self._cancel = scope.cancel if task is None else task.cancel
            self.state = "running"
            try:
                await self._call(self.pool, self.servers)
            finally:
                self.state = "after"
                if self._call in (pause_update_resume, release_reload):
                    # As the engine does, whatever became of the call.
                    with anyio.CancelScope(shield=True):
                        await self.pool.reload(["kv"])
                        await self.pool.resume()

    async def _generate(self, number: int) -> None:
        with suppress(InferenceError):
            await self.pool.generate(attempt(number))

    async def _use(self) -> None:
        pool = self.pool
        with fail_after(100):
            await pool.pause(PauseMode.ABORT)
            await pool.update_weights({}, 7)
            await pool.resume()
            await sleep(1)
            states = {one.name: one.state for one in pool.servers}
            assert set(states.values()) <= {"serving", "out"}, states
            assert "serving" in states.values(), states
            assert all(one.turns == 0 for one in pool.servers), pool.servers
            many = [attempt(number) for number in range(12)]
            for one in many:
                one.version = 7
            async with create_task_group() as tasks:
                for one in many:
                    tasks.start_soon(pool.generate, one)
            assert all(len(one.received) == 5 for one in many)
            assert {v for one in many for v in one.received.versions} == {7}


@pytest.mark.parametrize(
    "call",
    [
        generating,
        generating_at_one_that_dies,
        pause_update_resume,
        release_reload,
        asking,
        join,
        leave,
    ],
    ids=lambda call: call.__name__,
)
@every_way
def test_a_call_is_cancelled_at_every_step_and_the_pool_works_on(
    call: Call, backend: Backend, native: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    step = cancelled = 0
    while True:
        step += 1
        run = Cancelled(call, native=native)
        report = act_at_steps(run.run, {step: run.act}, backend=backend)
        where = f"step {step}: {report}, {run.pool}"
        assert report.tasks_left == 0, where
        for name, one in run.servers.items():
            assert not one.open, (where, name)
            assert one.refused == [], (where, name)
        if run.too_late:
            break
        cancelled += 1
    told(capsys, call.__name__, backend, native, cancelled)
    assert cancelled > 20
