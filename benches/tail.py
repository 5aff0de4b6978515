"""Useful tokens per second with long-tailed lengths: what each way of updating the weights costs the policy's server.

Simulated, in virtual time: exact, the same on every machine, no model. The server has `SLOTS` slots, first come first
served. A request takes a slot, reads its prompt and partial at `PREFILL` tokens per second, and writes `RATE` tokens
per second until the answer ends or it is aborted. Answers are log-normal in length, cut at `LONGEST`; the length is
that of the sample, however often it is interrupted, and the same in every way. The trainer takes a batch, trains for
`TRAIN` seconds, and pauses to load new weights, which takes `LOAD` seconds.

- synchronous: a batch is started when the trainer asks for it, so nothing runs while it trains
- ABORT, partials kept: production runs ahead; a pause cuts turns short and they go on from their partial
- ABORT, partials discarded: the same, but what a cut turn had is thrown away and it starts anew
- WAIT: production runs ahead; a pause waits until the turns in flight have ended

Useful tokens are those of delivered batches, over the time from the first pause to the last. Each sample of a row is
one run with other lengths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection

import anyio
from anyio import Event, Semaphore, current_time, move_on_after, sleep
from attrs import frozen

from benches.harness import Row, main, row
from benches.instant import InstantController
from rollnest import (
    AsyncStrategy,
    Attempt,
    Capacity,
    Engine,
    PauseMode,
    ProduceStrategy,
    Prompt,
    Sampling,
    SyncStrategy,
    TaskSpec,
)
from rollnest.testing import virtual_backends

__all__ = ["Server", "Way", "run", "simulate"]

SLOTS = 128
RATE = 50.0  # tokens per second that each slot writes
PREFILL = 10_000.0  # tokens per second that each slot reads
MEDIAN, SPREAD, LONGEST = 400.0, 1.0, 8_192  # tokens of an answer: log-normal
GROUPS, GROUP_SIZE = 16, 8
TRAIN, LOAD = 20.0, 2.0  # seconds
PROMPT = list(range(1, 65))


class Server(InstantController):
    """A policy server with so many slots and a fixed rate in each.

    Args:
        seed: Of the lengths.
        discard: Whether the reply to an abort is empty, so that the turn starts anew.

    Attributes:
        written: Tokens written, useful or not.
    """

    def __init__(self, seed: int, *, discard: bool = False) -> None:
        self.written = 0
        self._seed = seed
        self._discard = discard
        self._slots = Semaphore(SLOTS, fast_acquire=True)
        self._aborts: dict[str, Event] = {}

    async def generate(self, attempt: Attempt) -> None:
        """Writes until the answer ends, or until an abort."""
        aborted = self._aborts[attempt.id] = Event()
        try:
            read = len(attempt.prompt_ids)
            left = length(f"{self._seed}/{attempt.affinity}") - (read - len(PROMPT))
            wrote = 0
            async with self._slots:
                if not aborted.is_set():
                    started = current_time()
                    with move_on_after(read / PREFILL + left / RATE):
                        await aborted.wait()
                    writing = max(0.0, current_time() - started - read / PREFILL)
                    wrote = min(left, int(writing * RATE + 1e-6)) if aborted.is_set() else left
        finally:
            del self._aborts[attempt.id]
        self.written += wrote
        done = wrote == left
        if wrote and (done or not self._discard):
            attempt.commit([5] * wrote, [-1.0] * wrote)
        attempt.finish("stop" if done else "abort")

    async def abort(self, ids: Collection[str] | None) -> None:
        """Ends requests, those that wait for a slot too."""
        for id_, aborted in self._aborts.items():
            if ids is None or id_ in ids:
                aborted.set()


def length(name: str) -> int:
    """Tokens of a sample's whole answer."""
    drawn = random.Random(name).lognormvariate(math.log(MEDIAN), SPREAD)
    return max(1, min(LONGEST, round(drawn)))


@frozen
class Way:
    """A way to update the weights."""

    name: str
    strategy: ProduceStrategy
    mode: PauseMode = PauseMode.ABORT
    discard: bool = False


WAYS = (
    Way("synchronous", SyncStrategy()),
    Way("ABORT, partials kept", AsyncStrategy(max_staleness=8, lead=1.0)),
    Way("ABORT, partials discarded", AsyncStrategy(max_staleness=8, lead=1.0), discard=True),
    Way("WAIT", AsyncStrategy(max_staleness=8, lead=1.0), mode=PauseMode.WAIT),
)


async def simulate(way: Way, seed: int, steps: int) -> tuple[float, float]:
    """Runs a trainer for so many steps.

    Returns:
        Useful tokens per second, and tokens written for each useful one.
    """
    server = Server(seed, discard=way.discard)
    prompts = [Prompt(str(n), token_ids=PROMPT) for n in range(1000)]
    task = TaskSpec(
        "t",
        prompts,
        judger=None,
        group_size=GROUP_SIZE,
        sampling=Sampling(LONGEST),
        strategy=way.strategy,
    )
    engine = Engine(
        server, task, batch_size=GROUPS, capacity=Capacity(turns=None), control_timeout=3600.0
    )
    useful, started, written = 0, 0.0, 0
    async with engine:
        for step in range(steps + 1):
            batch = await engine.next_batch()
            await sleep(TRAIN)
            async with engine.paused(way.mode, grace=3600.0) as pause:
                await sleep(LOAD)
                await pause.update_weights({})
            if step:
                useful += batch.statistics.policy_tokens
            else:
                started, written = current_time(), server.written
        seconds, written = current_time() - started, server.written - written
    return useful / seconds, written / useful


def run(quick: bool) -> list[Row]:
    """Runs every way with the same lengths."""
    backend, options = virtual_backends()[0]()
    seeds, steps = (2, 10) if quick else (6, 20)
    rates: dict[str, list[float]] = {}
    spent: dict[str, list[float]] = {}
    for seed in range(seeds):
        for way in WAYS:
            rate, cost = anyio.run(
                simulate, way, seed, steps, backend=backend, backend_options=options
            )
            rates.setdefault(way.name, []).append(rate)
            spent.setdefault(way.name, []).append(cost)
    base = rates[WAYS[0].name]
    return [
        *(
            row(f"{name}: useful tokens per virtual second", "tokens/s", found, baseline=base)
            for name, found in rates.items()
        ),
        *(
            row(f"{name}: written for each useful token", "tokens", found)
            for name, found in spent.items()
        ),
    ]


if __name__ == "__main__":
    main("tail", run)
