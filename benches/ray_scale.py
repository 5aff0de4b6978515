"""Agent loops in Ray's actors against the same loops beside the engine: samples per second, and what the driver pays.

Loops of two turns with a tool between, that cost next to nothing by themselves, against an instant policy: so what is
measured is the way to the actors and back, five messages each way for a sample. Then loops whose own code takes 2 ms of
a CPU, for which actors are made.

Then a pause of 512 turns that are counted at the policy, over 4 actors: from the call to the block's beginning. Beside
it, in the same minute, what Ray takes for a call of each of these actors and back.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
from anyio import create_task_group

from benches.harness import BACKENDS, Row, calm, main, now, row
from benches.instant import InstantController
from rollnest import Capacity, Engine, Prompt, Rollout, Sampling, TaskSpec
from rollnest.abc import Attempt, PauseMode

__all__ = ["light", "measure", "pauses", "run"]

GROUP = 8
IN_FLIGHT = 512
AT_LEAST = 400


async def light(rollout: Rollout) -> None:
    """Two turns, with a tool between."""
    await rollout.generate()
    rollout.append([await rollout.tool(plus_one, 4)])
    await rollout.generate()


async def plus_one(number: int) -> int:
    return number + 1


async def heavy(rollout: Rollout) -> None:
    """The same, and 2 ms of a CPU after each turn: parsing, rendering, searching."""
    for _ in range(2):
        await rollout.generate()
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass


class HoldingController(InstantController):
    """Gives each attempt a token and holds it until it is aborted, as a server does that streams.

    Attributes:
        held: Attempts that it holds now.
    """

    def __init__(self) -> None:
        self.held: dict[str, anyio.Event] = {}

    async def generate(self, attempt: Attempt) -> None:
        """Holds it."""
        attempt.commit([5], [-1.0])
        aborted = self.held[attempt.id] = anyio.Event()
        try:
            await aborted.wait()
        finally:
            del self.held[attempt.id]
        attempt.finish("abort")

    async def abort(self, ids: Any) -> None:
        """Lets them go."""
        for number in list(self.held) if ids is None else ids:
            if number in self.held:
                self.held[number].set()


def task(loop: Any, name: str = "bench") -> TaskSpec:
    prompts = [Prompt(f"p{i}", token_ids=[1 + i % 90, 2, 3]) for i in range(512)]
    return TaskSpec(name, prompts, judger=None, loop=loop, group_size=GROUP, sampling=Sampling(16))


def loops(function: Callable[[Rollout], Awaitable[None]], workers: int) -> Any:
    """The loop, beside the engine with no workers."""
    if not workers:
        return function
    from rollnest_adapters.ray import RayLoops, RayOptions

    return RayLoops(function, workers, options=RayOptions(num_cpus=0))


async def measure(
    function: Callable[[Rollout], Awaitable[None]], workers: int, groups: int, batches: int
) -> tuple[list[float], list[float]]:
    """Returns samples per second, and milliseconds of the driver's CPU per sample, of each batch but the first."""
    rates: list[float] = []
    costs: list[float] = []
    async with Engine(InstantController(), task(loops(function, workers))) as engine:
        await engine.next_batch(groups)
        for _ in range(batches):
            calm()
            began, paid = now(), cpu()
            await engine.next_batch(groups)
            samples = groups * GROUP
            rates.append(samples / (now() - began))
            costs.append((cpu() - paid) / samples * 1e3)
    return rates, costs


def cpu() -> float:
    """Seconds of CPU of this process, Ray's threads in it too."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def pauses(workers: int, times: int) -> tuple[list[float], list[float], int]:
    """Returns ms of each pause, ms of Ray's own round trip to all actors beside it, and the fewest turns held."""
    controller, held = HoldingController(), IN_FLIGHT
    quiet: list[float] = []
    trips: list[float] = []
    where = loops(light, workers)
    capacity = Capacity(turns=IN_FLIGHT)
    async with (
        Engine(controller, task(where), capacity=capacity) as engine,
        create_task_group() as tasks,
    ):
        tasks.start_soon(partial(engine.next_batch, IN_FLIGHT // GROUP))
        for _ in range(times):
            while len(controller.held) < IN_FLIGHT:  # noqa: ASYNC110  (other processes have to come round)
                await anyio.sleep(0.01)
            if workers:
                began = now()
                await where.states()
                trips.append((now() - began) * 1e3)
            calm()
            held = min(held, len(controller.held))
            began = now()
            async with engine.paused(PauseMode.ABORT):
                quiet.append((now() - began) * 1e3)
        tasks.cancel_scope.cancel()
    return quiet, trips, held


def run(quick: bool) -> list[Row]:
    """Runs all cases."""
    import ray

    cluster: Any = ray
    rows: list[Row] = []
    groups, batches = (16, 2) if quick else (64, 5)
    started = not ray.is_initialized()
    if started:
        cluster.init(
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 * 2**20,
        )
    try:
        for backend in BACKENDS[:1] if quick else BACKENDS:
            for name, function in (("light", light), ("heavy", heavy)):
                local: list[float] = []
                for workers in (0, 1, 2) if quick else (0, 1, 2, 4):
                    main_of: Any = measure
                    rates, costs = anyio.run(
                        main_of, function, workers, groups, batches, backend=backend
                    )
                    where = f"{workers} actors" if workers else "beside the engine"
                    rows.append(
                        row(
                            f"{name} loops, {where}, {backend}",
                            "samples/s",
                            rates,
                            baseline=local or None,
                        )
                    )
                    rows.append(
                        row(f"{name} loops, {where}, {backend}: driver's CPU a sample", "ms", costs)
                    )
                    local = local or rates
            for workers in (0, 4):
                pause_of: Any = pauses
                quiet, trips, held = anyio.run(pause_of, workers, 5, backend=backend)
                if held < AT_LEAST:
                    raise RuntimeError(f"the policy held {held} turns, not {AT_LEAST}")
                where = f"{workers} actors" if workers else "beside the engine"
                trip = statistics.median(trips) if trips else 0.0
                rows.append(
                    row(f"pause, {held} held, {where}, {backend}", "ms", quiet, at_most=100 + trip)
                )
                if trips:
                    rows.append(row(f"Ray's own round trip to them, {backend}", "ms", trips))
    finally:
        if started:
            cluster.shutdown()
    return rows


if __name__ == "__main__":
    from benches import ray_scale  # by its name, so that actors can find its loops

    main("ray_scale", ray_scale.run)
