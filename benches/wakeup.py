"""How long a trainer waits for what is there already, and a policy for work.

Batch: from the step in which the last group of a batch becomes ready until `next_batch` has returned, with 512 other
turns in flight. The last group's members end, are recorded, and the group settles; an instrument hears that, and there
the time begins. The trainer holds the batch before until it has the next one, as the variable of a loop does: what it
takes to free 512 samples is not counted.

Resume: from the end of the paused block until the policy has the first request, and until it has all of them, with n
turns parked at the gate. Their tasks wake in the order in which they were parked, so the first request waits for
nobody but the controller's `resume`.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from anyio import Event, create_task_group

from benches.bare import bare_wake
from benches.harness import BACKENDS, Row, calm, main, now, row, settle, until
from benches.instant import Line, LineController, ParkingController
from rollnest import (
    AsyncStrategy,
    Attempt,
    Batch,
    Capacity,
    Engine,
    Group,
    Prompt,
    Sampling,
    TaskSpec,
)
from rollnest.abc import Instrument

__all__ = ["batch_ready", "batch_row", "resume", "resume_row", "run"]


class Ended(Instrument):
    """When the last group ended."""

    def __init__(self) -> None:
        self.at = 0.0

    def group_ended(self, group: Group, outcome: str) -> None:
        """A group ended."""
        self.at = now()


async def batch_ready(groups: int, rounds: int) -> list[float]:
    """Milliseconds from a batch's last group to the return of `next_batch`, with 64 further groups of 8 in flight."""
    line, ended = Line(), Ended()
    prompts = [Prompt(str(n), token_ids=[1, 2]) for n in range(groups + 64)]
    strategy = AsyncStrategy(max_staleness=1, lead=64 / groups)
    task = TaskSpec("t", prompts, judger=None, sampling=Sampling(32), strategy=strategy)
    engine = Engine(
        LineController(line),
        task,
        batch_size=groups,
        capacity=Capacity(turns=None),
        instruments=[ended],
    )
    taken: list[float] = []
    held: Batch | None = None

    async def consume(returned: Event) -> None:
        nonlocal held
        batch = await engine.next_batch()
        taken.append((now() - ended.at) * 1e3)
        held = batch
        returned.set()

    async with engine, create_task_group() as tasks:
        for _ in range(rounds):
            await until(lambda: len(line) == (groups + 64) * 8)
            returned = Event()
            tasks.start_soon(consume, returned)
            for _ in range(groups - 1):
                line.step()
            await until(lambda: engine.statistics().tasks["t"].ready == groups - 1)
            await settle()
            calm()
            line.step()
            await returned.wait()
    return taken


class Requests(ParkingController):
    """Knows when the first request came, and when all had come."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.first = 0.0
        self.last = 0.0
        self.all_here = Event()
        self._turns = turns

    def forget(self) -> None:
        """Starts anew."""
        self.all_here = Event()

    async def generate(self, attempt: Attempt) -> None:
        """Notes the time, and parks."""
        if not self.open:
            self.first = now()
        if len(self.open) == self._turns - 1:
            self.last = now()
            self.all_here.set()
        await super().generate(attempt)


async def resume(turns: int, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds from the end of a paused block until the policy has the first request, and until it has all."""
    controller = Requests(turns)
    prompts = [Prompt(str(n), token_ids=[1, 2]) for n in range(turns // 8)]
    task = TaskSpec("t", prompts, judger=None, sampling=Sampling(900_000))
    first: list[float] = []
    last: list[float] = []
    async with (
        Engine(controller, task, capacity=Capacity(turns=None)) as engine,
        create_task_group() as tasks,
    ):
        tasks.start_soon(engine.next_batch, len(prompts))
        await controller.all_here.wait()
        for _ in range(rounds):
            await settle()
            async with engine.paused():
                await settle()
                controller.forget()
                calm()
                started = now()
            await controller.all_here.wait()
            first.append((controller.first - started) * 1e3)
            last.append((controller.last - started) * 1e3)
        tasks.cancel_scope.cancel()
    return first, last


def run(quick: bool) -> list[Row]:
    """Runs every case."""
    rows: list[Row] = []
    rounds = 10 if quick else 60
    for backend in BACKENDS:
        for groups in (1, 64):
            taken = anyio.run(batch_ready, groups, rounds, backend=backend)
            rows.append(batch_row(backend, groups, taken))
        for turns in (512,) if quick else (64, 512, 2048):
            few = rounds if turns == 512 else min(rounds, 20)
            floor = anyio.run(bare_wake, turns, few, backend=backend)
            first, last = anyio.run(resume, turns, few, backend=backend)
            rows.append(resume_row(backend, turns, first, baseline=floor))
            rows.append(row(f"{backend}, resume to last request, {turns:,} parked", "ms", last))
    return rows


def batch_row(backend: str, groups: int, taken: Sequence[float]) -> Row:
    """A batch's row; a large batch is put together in between, group by group."""
    case = f"{backend}, batch of {groups} x 8 ready until next_batch returns"
    return row(case, "ms", taken, at_most=0.2)


def resume_row(
    backend: str, turns: int, first: Sequence[float], *, baseline: Sequence[float]
) -> Row:
    """A resume's row; the goal is for 512 parked turns."""
    case = f"{backend}, resume to first request, {turns:,} parked"
    return row(case, "ms", first, baseline=baseline, at_most=2.0 if turns == 512 else None)


if __name__ == "__main__":
    main("wakeup", run)
