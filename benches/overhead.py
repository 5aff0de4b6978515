"""What the engine costs per sample, against a bare anyio nest of the same shape, and how long the import takes."""

from __future__ import annotations

import subprocess
import sys
import time

import anyio
from anyio.lowlevel import checkpoint

from benches.harness import Row, main, row
from benches.instant import InstantController
from rollnest import Engine, Prompt, Sampling, TaskSpec

PROMPTS = [Prompt(str(number), token_ids=[1 + number % 90, 2]) for number in range(1000)]


async def bare(samples: int, group_size: int) -> float:
    """Microseconds per sample of task groups in a task group, each task with one checkpoint."""

    async def group() -> None:
        async with anyio.create_task_group() as members:
            for _ in range(group_size):
                members.start_soon(checkpoint)

    started = time.perf_counter()
    for _ in range(10):
        async with anyio.create_task_group() as groups:
            for _ in range(samples // group_size // 10):
                groups.start_soon(group)
    return (time.perf_counter() - started) / samples * 1e6


async def engine(samples: int, group_size: int) -> float:
    """Microseconds per sample of the whole engine: draw, group, gate, turn, record, table, batch."""
    task = TaskSpec("t", PROMPTS, judger=None, group_size=group_size, sampling=Sampling(32))
    async with Engine(InstantController(), task) as running:
        await running.next_batch(20)
        started = time.perf_counter()
        for _ in range(10):
            await running.next_batch(samples // group_size // 10)
        seconds = time.perf_counter() - started
    return seconds / samples * 1e6


def import_seconds() -> float:
    """Seconds that `import rollnest` takes in a fresh interpreter, beyond starting it."""
    code = "import time; t = time.perf_counter(); import rollnest; print(time.perf_counter() - t)"
    return float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    )


def run(quick: bool) -> list[Row]:
    """Runs every case; engine and baseline take turns, so that both see the same machine."""
    rows: list[Row] = []
    rounds = 3 if quick else 9
    for backend in ("asyncio", "trio"):
        for group_size in (8, 1):
            for samples in (1_000,) if quick else (1_000, 10_000, 100_000):
                baseline: list[float] = []
                measured: list[float] = []
                for _ in range(rounds if samples < 100_000 else 3):
                    baseline.append(anyio.run(bare, samples, group_size, backend=backend))
                    measured.append(anyio.run(engine, samples, group_size, backend=backend))
                rows.append(
                    row(
                        f"{backend}, groups of {group_size}, {samples:,} samples",
                        "us/sample",
                        measured,
                        baseline=baseline,
                        at_most_ratio=1.5 if samples == 10_000 else None,
                    )
                )
    rows.append(row("import rollnest", "s", [import_seconds() for _ in range(rounds)], at_most=0.3))
    return rows


if __name__ == "__main__":
    main("overhead", run)
