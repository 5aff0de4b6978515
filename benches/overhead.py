"""What the engine costs per sample, against the same nest written by hand, and how long the import takes.

Engine, nest and gather take turns batch by batch in one event loop, so all three see the same machine at the same time.
A figure is the time of one batch of 1,000 samples over its samples: `1,000 samples` is the first batch of a fresh
engine, `10,000` its first ten, `100,000` the second half of one long run, with a fresh engine's first batch after each.
`InstantController` answers at once, so what is measured is the engine: draw, group, gate, turn, record, table, batch.

Staggered: so many groups are in flight at once, and they end one by one, each after the consumer has looked at the one
before. Whatever the engine scans at each wake-up would make 2,000 groups dearer than 500, per group. Both are parked in
one event loop, and take turns: a tenth of the one, a tenth of the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from attrs import field, frozen

from benches.harness import BACKENDS, Row, calm, main, now, row, until
from benches.instant import (
    IDS,
    LOGPROBS,
    InstantController,
    Line,
    LineController,
    NextInLine,
    Relay,
)
from benches.nest import Nest, Reply, gather
from rollnest import Capacity, Engine, Prompt, Sampling, TaskSpec

BATCH = 1_000  # samples
PROMPTS = [Prompt(str(number), token_ids=[1 + number % 90, 2]) for number in range(2_000)]


@frozen
class Costs:
    """Microseconds per sample or group, batch by batch or stride by stride."""

    engine: list[float] = field(factory=list[float])
    nest: list[float] = field(factory=list[float])
    gather: list[float] = field(factory=list[float])


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


async def against_fresh(backend: str, group_size: int, count: int) -> tuple[Costs, list[float]]:
    """Runs that many batches in one long run, and measures the second half of them.

    Returns:
        What they cost, and what the first batch of a fresh engine costs, measured after each of them.
    """
    costs = Costs()
    fresh: list[float] = []
    groups = BATCH // group_size
    task = TaskSpec("t", PROMPTS, judger=None, group_size=group_size, sampling=Sampling(32))
    calm()
    async with Engine(InstantController(), task) as engine, Nest(group_size) as nest:
        for _ in range(count // 2):
            await engine.next_batch(groups)
            await nest.batch(groups)
        for _ in range(count - count // 2):
            before = now()
            await nest.batch(groups)
            nested = now()
            await engine.next_batch(groups)
            ended = now()
            costs.nest.append((nested - before) / BATCH * 1e6)
            costs.engine.append((ended - nested) / BATCH * 1e6)
            async with Engine(InstantController(), task) as other:
                await other.next_batch(20)
                before = now()
                await other.next_batch(groups)
                fresh.append((now() - before) / BATCH * 1e6)
    return costs, fresh


async def staggered(sizes: Sequence[int], group_size: int, strides: int) -> list[Costs]:
    """Has batches of each size end group by group, engines and nests in turns, stride by stride.

    Returns:
        For each size, microseconds per group, stride by stride.
    """
    lines = {
        (groups, by_hand): Line(stride=groups // strides)
        for groups in sizes
        for by_hand in (True, False)
    }
    async with AsyncExitStack() as stack:
        runs: list[Callable[[], Coroutine[Any, Any, object]]] = []
        for (groups, by_hand), line in lines.items():
            if by_hand:
                generate = _in_line(line, group_size)
                nest = Nest(group_size, turns=groups * group_size, generate=generate)
                await stack.enter_async_context(nest)
                runs.append(partial(nest.batch, groups))
            else:
                engine = await stack.enter_async_context(_staggered_engine(line, group_size))
                runs.append(partial(engine.next_batch, groups))
        async with anyio.create_task_group() as consumers:
            for run_batch in runs:
                consumers.start_soon(run_batch)
            calls = sum(groups for groups, _ in lines) * group_size
            await until(lambda: sum(map(len, lines.values())) == calls)
            calm()
            Relay(list(lines.values())).hand_over()
    return [
        Costs(
            engine=[seconds * 1e6 for seconds in lines[groups, False].paces],
            nest=[seconds * 1e6 for seconds in lines[groups, True].paces],
        )
        for groups in sizes
    ]


def _staggered_engine(line: Line, group_size: int) -> Engine:
    task = TaskSpec("t", PROMPTS, judger=None, group_size=group_size, sampling=Sampling(32))
    capacity = Capacity(turns=None)
    return Engine(LineController(line), task, capacity=capacity, instruments=[NextInLine(line)])


def _in_line(line: Line, group_size: int) -> Callable[[], Coroutine[Any, Any, Reply]]:
    """The policy of a nest whose groups end one by one."""
    asked, answered = count(), count(1)

    async def generate() -> Reply:
        await line.wait(next(asked) // group_size)
        if next(answered) % group_size == 0:
            line.ended()
        return IDS, LOGPROBS

    return generate


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
        rows += one_by_one(backend, quick)
    seconds = import_seconds(5 if quick else 50)
    return [*rows, row("import rollnest", "s", seconds, at_most=0.3)]


def per_sample(backend: str, group_size: int, quick: bool) -> list[Row]:
    """Cost per sample at 1,000, 10,000 and 100,000."""

    def of(count: int) -> Costs:
        return anyio.run(batches, backend, group_size, count, backend=backend)

    where = f"{backend}, groups of {group_size}"
    fresh, first = Costs(), Costs()
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
        late, beside = anyio.run(against_fresh, backend, group_size, 100, backend=backend)
        against = f"{where}, 100,000 samples, against 1,000"
        rows += [
            _cost(f"{where}, 100,000 samples", late),
            row(against, "us/sample", late.engine, baseline=beside, at_most_ratio=1.2),
        ]
    if group_size == 8:
        rate = [1e6 / cost for cost in first.engine]
        goal = 10_000 if backend == "asyncio" else None
        rows.append(row(f"{where}, samples per second", "samples/s", rate, at_least=goal))
    return rows


def one_by_one(backend: str, quick: bool) -> list[Row]:
    """Cost per group where one group ends at each wake-up of the consumer."""
    rows: list[Row] = []
    sizes, strides, runs = ((125, 500), 5, 1) if quick else ((500, 2_000), 10, 5)
    found = [Costs() for _ in sizes]
    for _ in range(runs):
        for into, costs in zip(
            found, anyio.run(staggered, sizes, 8, strides, backend=backend), strict=True
        ):
            _extend(into, costs, slice(None))
    for groups, costs in zip(sizes, found, strict=True):
        case = f"{backend}, {groups:,} staggered groups of 8"
        rows.append(row(case, "us/group", costs.engine, baseline=costs.nest))
    case = f"{backend}, {sizes[-1]:,} staggered groups, against {sizes[0]:,}"
    most, least = found[-1].engine, found[0].engine
    rows.append(row(case, "us/group", most, baseline=least, at_most_ratio=1.2))
    return rows


def _cost(case: str, costs: Costs, at_most_ratio: float | None = None) -> Row:
    return row(case, "us/sample", costs.engine, baseline=costs.nest, at_most_ratio=at_most_ratio)


def _extend(into: Costs, costs: Costs, part: slice) -> None:
    into.engine.extend(costs.engine[part])
    into.nest.extend(costs.nest[part])
    into.gather.extend(costs.gather[part])


if __name__ == "__main__":
    main("overhead", run)
