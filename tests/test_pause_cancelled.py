"""The task that pauses is cancelled at every scheduler step. The engine lives in another one, and goes on.

It may be broken only if the cancellation came while the weights were moved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

import anyio
import pytest
from anyio import CancelScope, Event, create_task_group, fail_after
from anyio.lowlevel import checkpoint

from rollnest import AsyncStrategy, Batch, Engine, PauseMode, Sample, Sampling
from rollnest.abc import ReleaseTag
from rollnest.errors import EngineBroken
from rollnest.testing import ScriptedController, assert_conserved, cancel_at_step

from .helpers import each_way, spec

ALL: tuple[ReleaseTag, ...] = ("kv", "weights")
PAUSES: list[tuple[PauseMode, Sequence[ReleaseTag]]] = [
    *((mode, ()) for mode in PauseMode),
    (PauseMode.ABORT, ALL),
    (PauseMode.EVICT, ALL),
]


async def judge(sample: Sample) -> float:
    await anyio.sleep(0.3)
    return 1.0


class Run:
    """An engine in a task of its own, and a pauser that is cancelled."""

    def __init__(self, mode: PauseMode, release: Sequence[ReleaseTag]) -> None:
        self.mode = mode
        self.release = release
        self.controller = ScriptedController(rate=10.0, stop_every=10_000)
        task = spec(
            judger=judge, sampling=Sampling(5), strategy=AsyncStrategy(max_staleness=2, lead=1)
        )
        self.engine = Engine(self.controller, task, batch_size=2)
        self.moving = False
        self.moved = False
        self.batch: Batch | None = None
        self.broken = False

    async def operation(self) -> None:
        """Everything; the counter cancels this task."""
        ready, finish = Event(), Event()
        async with create_task_group() as group:
            group.start_soon(self._host, ready, finish)
            try:
                await ready.wait()
                await self._pause()
            finally:
                finish.set()

    async def _pause(self) -> None:
        async with self.engine.paused(self.mode, release=self.release) as pause:
            await checkpoint()
            self.moving = True
            await pause.update_weights(checkpoint)
            self.moving, self.moved = False, True
            await checkpoint()

    async def _host(self, ready: Event, finish: Event) -> None:
        with CancelScope(shield=True):
            try:
                async with self.engine:
                    await anyio.sleep(0.65)  # some groups are judged, some are in their turns
                    ready.set()
                    await finish.wait()
                    with fail_after(100):
                        self.batch = await self.engine.next_batch(wait_in_pause=True)
            except EngineBroken:
                self.broken = True


@pytest.mark.parametrize(
    ("mode", "release"),
    PAUSES,
    ids=[f"{mode.name}{'-release' if release else ''}" for mode, release in PAUSES],
)
@each_way
def test_cancelled_at_every_step(
    mode: PauseMode,
    release: Sequence[ReleaseTag],
    backend: Literal["asyncio", "trio"],
    native: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = broken = 0
    while True:
        step += 1
        run = Run(mode, release)
        report = cancel_at_step(run.operation, step, backend=backend, native=native)
        controller, engine = run.controller, run.engine
        where = f"step {step}: {report}, {controller.log[-6:]}"
        assert report.tasks_left == 0, where
        assert not controller.open, where
        assert controller.while_paused == 0, where
        assert controller.refused == [], where
        assert controller.log[-1] == ("exit", 0), where
        assert run.broken != (run.batch is not None), where
        assert not run.broken or run.moving, where
        if run.batch is not None:
            assert engine.version == run.moved == run.batch.version, where
        assert_conserved(engine, committed=controller.committed)
        broken += run.broken
        if not report.cancelled:
            break
    assert step > 60
    assert broken < 12  # the few steps of the update itself
    with capsys.disabled():
        way = f"{backend}{' native' if native else ''}"
        sys.stdout.write(f"\n{mode.name} on {way}: {step - 1} steps, broken at {broken} ")
