"""What the engine costs per sample, against the same nest written by hand, and how long the import takes.

Engine, nest and gather take turns batch by batch in one event loop, so all three see the same machine at the same time.
A figure is the time of one batch of 1,000 samples over its samples: `1,000 samples` is the first batch of a fresh
engine, `10,000` its first ten, `100,000` the second half of one long run. `InstantController` answers at once, so what
is measured is the engine: draw, group, gate, turn, record, table, batch.

Staggered: so many groups are in flight at once, and they end one by one, each after the consumer has looked at the one
before. Whatever the engine scans at each wake-up would make 2,000 groups dearer than 500, per group.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count
from tempfile import TemporaryDirectory

import anyio

from benches.harness import BACKENDS, Row, calm, main, now, row, until
from benches.instant import IDS, LOGPROBS, InstantController, Line, LineController, NextInLine
from benches.nest import Nest, Reply, gather
from rollnest import Capacity, Engine, Prompt, Sampling, TaskSpec

BATCH = 1_000  # samples
STRIDE = 50  # staggered groups
PROMPTS = [Prompt(str(number), token_ids=[1 + number % 90, 2]) for number in range(2_000)]


class Costs:
    """Microseconds per sample, batch by batch."""

    def __init__(self) -> None:
        self.engine: list[float] = []
        self.nest: list[float] = []
        self.gather: list[float] = []


async def batches(backend: str, group_size: int, count: int) -> Costs:
    """Runs that many batches on a fresh engine, and as many on a fresh nest, in turns."""
    costs = Costs()
    groups = BATCH // group_size
    task = TaskSpec("t", PROMPTS, judger=None, group_size=group_size, sampling=Sampling(32))
    calm()
    async with Engine(InstantController(), task) as engine, Nest(group_size) as nest:
        await engine.next_batch(20)
        await nest.batch(20)
        for _ in range(count):
            before = now()
            await gather(BATCH, backend)
            gathered = now()
            await nest.batch(groups)
            nested = now()
            await engine.next_batch(groups)
            ended = now()
            costs.gather.append((gathered - before) / BATCH * 1e6)
            costs.nest.append((nested - gathered) / BATCH * 1e6)
            costs.engine.append((ended - nested) / BATCH * 1e6)
    return costs


async def staggered_engine(groups: int, group_size: int, stride: int = STRIDE) -> list[float]:
    """Microseconds per group, for each `stride` groups of a batch whose groups end one by one."""
    line = Line(stride=stride)
    task = TaskSpec("t", PROMPTS, judger=None, group_size=group_size, sampling=Sampling(32))
    async with (
        Engine(
            LineController(line),
            task,
            capacity=Capacity(turns=None),
            instruments=[NextInLine(line)],
        ) as engine,
        anyio.create_task_group() as consumer,
    ):
        consumer.start_soon(engine.next_batch, groups)
        await _go(line, groups * group_size)
    return [seconds * 1e6 for seconds in line.paces]


async def staggered_nest(groups: int, group_size: int, stride: int = STRIDE) -> list[float]:
    """The same by hand."""
    line = Line(stride=stride)
    asked, answered = count(), count(1)

    async def generate() -> Reply:
        await line.wait(next(asked) // group_size)
        if next(answered) % group_size == 0:
            line.step()
        return IDS, LOGPROBS

    async with (
        Nest(group_size, turns=groups * group_size, generate=generate) as nest,
        anyio.create_task_group() as consumer,
    ):
        consumer.start_soon(nest.batch, groups)
        await _go(line, groups * group_size)
    return [seconds * 1e6 for seconds in line.paces]


async def _go(line: Line, calls: int) -> None:
    """Waits until all calls are in line, and lets the first group go; each lets the next go."""
    await until(lambda: len(line) == calls)
    calm()
    line.step()


def import_seconds(times: int) -> list[float]:
    """Seconds that `import rollnest` takes in a fresh interpreter, beyond starting it, after it was once compiled."""
    code = "import time; t = time.perf_counter(); import rollnest; print(time.perf_counter() - t)"
    with TemporaryDirectory() as compiled:  # whatever this process was told about writing bytecode
        command = [sys.executable, "-X", f"pycache_prefix={compiled}", "-c", code]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

        def seconds() -> float:
            ran = subprocess.run(command, capture_output=True, check=True, env=environment)
            return float(ran.stdout)

        seconds()
        return [seconds() for _ in range(times)]


def run(quick: bool) -> list[Row]:
    """Runs every case."""
    rows: list[Row] = []
    for backend in BACKENDS:
        for group_size in (8, 1):
            rows += per_sample(backend, group_size, quick)
    for backend in BACKENDS:
        rows += staggered(backend, quick)
    seconds = import_seconds(5 if quick else 50)
    return [*rows, row("import rollnest", "s", seconds, at_most=0.3)]


def per_sample(backend: str, group_size: int, quick: bool) -> list[Row]:
    """Cost per sample at 1,000, 10,000 and 100,000."""

    def of(count: int) -> Costs:
        return anyio.run(batches, backend, group_size, count, backend=backend)

    where = f"{backend}, groups of {group_size}"
    fresh, first, late = Costs(), Costs(), Costs()
    for _ in range(5 if quick else 45):
        _extend(fresh, of(1), slice(1))
    for _ in range(1 if quick else 5):
        costs = of(10)
        _extend(fresh, costs, slice(1))
        _extend(first, costs, slice(10))
    rows = [
        _cost(f"{where}, 1,000 samples", fresh),
        _cost(f"{where}, 10,000 samples", first, at_most_ratio=1.5),
        row(
            f"{where}, 10,000 samples, against gather",
            "us/sample",
            first.engine,
            baseline=first.gather,
        ),
    ]
    if not quick:
        _extend(late, of(100), slice(50, None))
        rows += [
            _cost(f"{where}, 100,000 samples", late),
            row(
                f"{where}, 100,000 samples, against 1,000",
                "us/sample",
                late.engine,
                baseline=fresh.engine,
                at_most_ratio=1.2,
            ),
        ]
    if group_size == 8:
        rate = [1e6 / cost for cost in first.engine]
        goal = 10_000 if backend == "asyncio" else None
        rows.append(row(f"{where}, samples per second", "samples/s", rate, at_least=goal))
    return rows


def staggered(backend: str, quick: bool) -> list[Row]:
    """Cost per group where one group ends at each wake-up of the consumer."""
    rows: list[Row] = []
    runs = {125: 1, 500: 1} if quick else {500: 5, 1_000: 3, 2_000: 2}
    sizes = list(runs)
    engine: dict[int, list[float]] = {groups: [] for groups in sizes}
    nest: dict[int, list[float]] = {groups: [] for groups in sizes}
    for turn in range(max(runs.values())):
        for groups in (size for size in sizes if turn < runs[size]):
            nest[groups] += anyio.run(staggered_nest, groups, 8, backend=backend)
            engine[groups] += anyio.run(staggered_engine, groups, 8, backend=backend)
    for groups in sizes:
        case = f"{backend}, {groups:,} staggered groups of 8"
        rows.append(row(case, "us/group", engine[groups], baseline=nest[groups]))
    case = f"{backend}, {sizes[-1]:,} staggered groups, against {sizes[0]:,}"
    most, least = engine[sizes[-1]], engine[sizes[0]]
    rows.append(row(case, "us/group", most, baseline=least, at_most_ratio=1.2))
    return rows


def _cost(case: str, costs: Costs, at_most_ratio: float | None = None) -> Row:
    return row(case, "us/sample", costs.engine, baseline=costs.nest, at_most_ratio=at_most_ratio)


def _extend(into: Costs, costs: Costs, part: slice) -> None:
    into.engine += costs.engine[part]
    into.nest += costs.nest[part]
    into.gather += costs.gather[part]


if __name__ == "__main__":
    main("overhead", run)
