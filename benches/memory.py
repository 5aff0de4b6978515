"""What a sample that waits keeps in memory, by tracemalloc.

Parked: turns that a pause has cut short wait at the gate, here without a token of their own: tasks, scopes, rollout,
response. Beside it what the same nest of bare tasks keeps. A token's bytes are what 4,096 tokens add to each sample,
come in one reply, or in 256 replies of 16 with a pause between them. Ready: samples of groups that wait for a batch.

Figures are certain but for what the allocator rounds up, so a handful of samples is enough.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
from anyio import Event, create_task_group

from benches.harness import BACKENDS, Row, main, row, settle, until
from benches.instant import IDS, LOGPROBS, InstantController, ParkingController
from benches.nest import Nest, Reply
from rollnest import AsyncStrategy, Capacity, Engine, Prompt, Sampling, TaskSpec

__all__ = ["nest_parked", "parked", "ready", "run"]


async def parked(samples: int, group_size: int, *, replies: int = 1, tokens: int = 0) -> float:
    """Bytes that so many parked turns keep, after so many replies of so many tokens each."""
    controller = ParkingController(tokens)
    prompts = [Prompt(str(n), token_ids=[1, 2]) for n in range(samples // group_size)]
    task = TaskSpec("t", prompts, judger=None, group_size=group_size, sampling=Sampling(900_000))
    async with (
        Engine(controller, task, capacity=Capacity(turns=None)) as engine,
        create_task_group() as tasks,
    ):
        await settle()
        async with _traced() as kept:
            tasks.start_soon(engine.next_batch, len(prompts))
            for _ in range(replies):
                await until(lambda: len(controller.open) == samples)
                async with engine.paused():
                    await settle()
                    kept.read()
        tasks.cancel_scope.cancel()
    return kept.bytes


async def ready(samples: int, group_size: int) -> float:
    """Bytes that so many samples of 16 tokens keep that are ready for a batch."""
    groups = samples // group_size
    prompts = [Prompt(str(n), token_ids=[1, 2]) for n in range(groups)]
    task = TaskSpec(
        "t",
        prompts,
        judger=None,
        group_size=group_size,
        sampling=Sampling(32),
        strategy=AsyncStrategy(max_staleness=1),
    )
    engine = Engine(InstantController(), task, batch_size=groups)
    async with _traced() as kept, engine:
        await until(lambda: engine.statistics().tasks["t"].ready == groups)
        await settle()
        kept.read()
    return kept.bytes


async def nest_parked(samples: int, group_size: int) -> float:
    """Bytes that so many turns of the nest written by hand keep while they wait for an event each."""
    asked: list[Event] = []

    async def generate() -> Reply:
        asked.append(Event())
        await asked[-1].wait()
        return IDS, LOGPROBS

    async with (
        Nest(group_size, turns=samples, generate=generate) as nest,
        create_task_group() as tasks,
    ):
        await settle()
        async with _traced() as kept:
            tasks.start_soon(nest.batch, samples // group_size)
            await until(lambda: len(asked) == samples)
            kept.read()
        for event in asked:
            event.set()
    return kept.bytes


class _traced:  # noqa: N801  (used like a function)
    """Traces memory in its block; `read` takes the figure."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self._before = 0

    async def __aenter__(self) -> _traced:
        gc.collect()
        tracemalloc.start()
        self._before = tracemalloc.get_traced_memory()[0]
        return self

    async def __aexit__(self, *_: object) -> None:
        tracemalloc.stop()

    def read(self) -> None:
        """Takes what is kept now."""
        gc.collect()
        self.bytes = tracemalloc.get_traced_memory()[0] - self._before


def run(quick: bool) -> list[Row]:
    """Runs every case."""
    rows: list[Row] = []
    count, rounds = (256, 1) if quick else (1024, 2)
    for backend in BACKENDS:
        for group_size in (8, 1):
            rows.append(
                row(
                    f"{backend}, groups of {group_size}, parked sample without its tokens",
                    "bytes",
                    _per(backend, rounds, count, parked, count, group_size),
                    baseline=_per(backend, rounds, count, nest_parked, count, group_size),
                    at_most=12_000,
                )
            )
        case = f"{backend}, groups of 8, ready sample with 16 tokens"
        rows.append(row(case, "bytes", _per(backend, rounds, count, ready, count, 8)))
        few = 64
        bare = _per(backend, rounds, 1, parked, few, 8)
        for replies, tokens in ((1, 4096), (16, 256) if quick else (256, 16)):
            measured = partial(parked, replies=replies, tokens=tokens)
            added = [
                (with_tokens - without) / (few * replies * tokens)
                for with_tokens, without in zip(
                    _per(backend, rounds, 1, measured, few, 8), bare, strict=True
                )
            ]
            case = f"{backend}, token of a parked sample, {replies} replies of {tokens:,}"
            rows.append(row(case, "bytes", added, at_most=12))
    return rows


def _per(
    backend: str, rounds: int, count: int, bench: Callable[..., Awaitable[float]], *of: int
) -> list[float]:
    return [anyio.run(bench, *of, backend=backend) / count for _ in range(rounds)]


if __name__ == "__main__":
    main("memory", run)
