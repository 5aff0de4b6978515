"""What a checkpoint costs: the snapshot on the event loop, the loop's stalls while it is written, and its size.

Samples of 1,000 tokens wait for a batch, in groups of 8 or each in a group of its own; 512 more are in flight, with
half of their tokens. The snapshot is timed by itself. Then a save is awaited while a task sleeps for 1 ms again and
again: a stall is by how much it sleeps too long. Beside it the same sleeper while nothing is saved. Writing includes
bringing the files to the disk, so its time is the disk's.
"""

from __future__ import annotations

import statistics
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

import anyio
from anyio import create_task_group, sleep
from attrs import frozen

from benches.harness import BACKENDS, Row, calm, main, now, row, settle, until
from benches.instant import InstantController
from rollnest import AsyncStrategy, Attempt, Capacity, Engine, Prompt, Sampling, TaskSpec

__all__ = ["HalfwayController", "Saved", "measure", "run"]

BYTES_A_TOKEN = 9
"""Of the packed columns: id, logprob, origin."""

_TICK = 1e-3  # seconds


class HalfwayController(InstantController):
    """Answers the first groups at once; members of those after them get half of their tokens, and wait.

    Args:
        groups: How many groups it answers.
        tokens: Of each answer.

    Attributes:
        answered: Attempts that were answered.
        waiting: Attempts that wait.
    """

    def __init__(self, groups: int, tokens: int) -> None:
        self.answered = 0
        self.waiting = 0
        self._groups = groups
        self._tokens = tokens

    async def generate(self, attempt: Attempt) -> None:
        """Answers, or waits."""
        visit = int(attempt.affinity.split("/")[2])
        if visit < self._groups:
            await anyio.lowlevel.checkpoint()
            self._commit(attempt, self._tokens)
            attempt.finish("stop")
            self.answered += 1
            return
        self._commit(attempt, self._tokens // 2)
        self.waiting += 1
        await anyio.sleep_forever()

    @staticmethod
    def _commit(attempt: Attempt, tokens: int) -> None:
        attempt.commit(array("i", (5,)) * tokens, array("f", (-1.0,)) * tokens)


@frozen
class Saved:
    """What was measured.

    Attributes:
        snapshots: Milliseconds of each snapshot.
        stalls: By how many milliseconds the sleeper slept too long while it was written, each time.
        idle: The same while nothing was saved.
        seconds: How long the whole save took.
        size: Bytes on disk.
        raw: Bytes of the packed columns.
    """

    snapshots: Sequence[float]
    stalls: Sequence[float]
    idle: Sequence[float]
    seconds: float
    size: int
    raw: int


async def measure(
    samples: int, group_size: int, in_flight: int, tokens: int = 1000, rounds: int = 5
) -> Saved:
    """Makes samples that are ready and others in flight, and saves."""
    groups, running = samples // group_size, in_flight // group_size
    controller = HalfwayController(groups, tokens)
    task = TaskSpec(
        "t",
        [Prompt(str(n), token_ids=[1, 2, 3]) for n in range(groups + running)],
        judger=None,
        group_size=group_size,
        epochs=1,
        sampling=Sampling(tokens * 2),
        strategy=AsyncStrategy(max_staleness=1, lead=0, oversample=running / groups),
    )
    engine = Engine(controller, task, batch_size=groups, capacity=Capacity(turns=None))
    async with engine:
        await until(lambda: (controller.answered, controller.waiting) == (samples, in_flight))
        await settle()
        snapshots: list[float] = []
        for _ in range(rounds):
            calm()
            began = now()
            engine._parts.saver.snapshot()  # type: ignore[union-attr]  # pyright: ignore
            snapshots.append((now() - began) * 1e3)
        idle = await _stalls(0.5, None)
        calm()
        with tempfile.TemporaryDirectory() as directory:
            began = now()
            stalls: list[float] = []
            stalls += await _stalls(None, (engine, Path(directory)))
            seconds = now() - began
            size = _size(Path(directory))
    raw = BYTES_A_TOKEN * (samples * tokens + in_flight * (tokens // 2))
    return Saved(snapshots, stalls, idle, seconds, size, raw)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


async def _stalls(seconds: float | None, save: tuple[Engine, Path] | None) -> list[float]:
    """By how many milliseconds a sleeper sleeps too long, for so long or while an engine is saved."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            began = now()
            await sleep(_TICK)
            late.append((now() - began - _TICK) * 1e3)

    async with create_task_group() as tasks:
        tasks.start_soon(tick)
        if save is not None:
            engine, directory = save
            await engine.save(directory)
        elif seconds is not None:
            await sleep(seconds)
        tasks.cancel_scope.cancel()
    return late


def run(quick: bool) -> list[Row]:
    """Runs every case."""
    rows: list[Row] = []
    samples, in_flight = (1000, 64) if quick else (10_000, 512)
    for backend in BACKENDS:
        for group_size in (8, 1):
            saved = anyio.run(measure, samples, group_size, in_flight, backend=backend)
            case = (
                f"{backend}, {samples:,} samples in groups of {group_size}, {in_flight} in flight"
            )
            rows += [
                row(f"{case}: snapshot", "ms", saved.snapshots, at_most=5),
                row(
                    f"{case}: stall while it is written, p99",
                    "ms",
                    [_p99(saved.stalls)],
                    baseline=[_p99(saved.idle)],
                    at_most=10,
                ),
                row(f"{case}: longest stall", "ms", [max(saved.stalls)]),
                row(f"{case}: time", "s", [saved.seconds]),
                row(f"{case}: size", "x raw columns", [saved.size / saved.raw], at_most=1.5),
            ]
    return rows


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


if __name__ == "__main__":
    main("save", run)
