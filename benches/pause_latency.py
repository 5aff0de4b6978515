"""From the call of `paused()` to its block, with n turns in flight, against the floor: n events are set, and n tasks
wake and park at one gate."""

from __future__ import annotations

import time

import anyio
from anyio import Event

from benches.harness import Row, main, row
from benches.instant import ParkingController
from rollnest import Capacity, Engine, Prompt, Sampling, TaskSpec


async def floor(turns: int, rounds: int) -> list[float]:
    """Milliseconds until n tasks have woken by an event of their own and wait for one common event."""
    taken: list[float] = []
    for _ in range(rounds):
        events = [Event() for _ in range(turns)]
        gate, parked, all_parked = Event(), 0, Event()

        async def turn(event: Event) -> None:
            nonlocal parked
            await event.wait()
            parked += 1
            if parked == turns:
                all_parked.set()  # noqa: B023
            await gate.wait()  # noqa: B023

        async with anyio.create_task_group() as tasks:
            for event in events:
                tasks.start_soon(turn, event)
            await anyio.wait_all_tasks_blocked()
            started = time.perf_counter()
            for event in events:
                event.set()
            await all_parked.wait()
            taken.append((time.perf_counter() - started) * 1e3)
            gate.set()
    return taken


async def pause(turns: int, rounds: int) -> list[float]:
    """Milliseconds until the block is entered, each turn bringing a partial of 16 tokens that is recorded."""
    group_size = min(turns, 8)
    prompts = [Prompt(str(n), token_ids=[1, 2]) for n in range(max(1, turns // group_size))]
    task = TaskSpec("t", prompts, judger=None, group_size=group_size, sampling=Sampling(90_000))
    taken: list[float] = []
    controller = ParkingController()
    async with (
        Engine(controller, task, capacity=Capacity(turns=None)) as engine,
        anyio.create_task_group() as consumer,
    ):
        consumer.start_soon(engine.next_batch, len(prompts))
        for _ in range(rounds):
            while len(controller.open) < turns:
                await anyio.wait_all_tasks_blocked()
            started = time.perf_counter()
            async with engine.paused():
                taken.append((time.perf_counter() - started) * 1e3)
        consumer.cancel_scope.cancel()
    return taken


def run(quick: bool) -> list[Row]:
    """Runs every case."""
    rows: list[Row] = []
    rounds = 5 if quick else 50
    for backend in ("asyncio", "trio"):
        for turns in (1, 64, 512) if quick else (1, 64, 512, 2048, 8192):
            each = rounds if turns < 2048 else max(5, rounds // 5)
            rows.append(
                row(
                    f"{backend}, ABORT, {turns:,} turns in flight",
                    "ms",
                    anyio.run(pause, turns, each, backend=backend),
                    baseline=anyio.run(floor, turns, each, backend=backend),
                    at_most_ratio={512: 6.0, 8192: 10.0}.get(turns),
                )
            )
    return rows


if __name__ == "__main__":
    main("pause_latency", run)
