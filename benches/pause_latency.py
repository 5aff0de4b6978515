"""From the call of `paused()` to its block, with n turns in flight.

The policy is `ParkingController`: when the engine asks, all turns return at once, each with 16 tokens that go into its
record. So what is measured is the engine's part, beside four things that no engine can beat:

- the floor: n events are set, n tasks wake and park at one gate; in the same process, taking turns with the engine
- cancelling n bare tasks of the event loop, and seeing them end (which keeps nothing)
- for `EVICT`, cancelling a bare nest of n tasks: a scope and a task group for each 8 of them, as the engine has
- the longest turn of the event loop in the floor, beside the longest turn in a pause: what another task has to wait

In `WAIT` the turns end by themselves, all at the moment in which the gate closes.

A request that reaches the server 200 ms after the abort is simulated, in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import anyio
from anyio import create_task_group

from benches.bare import Watch, bare_cancel, bare_evict, bare_floor, bare_stall
from benches.harness import BACKENDS, Row, calm, main, now, row, until
from benches.instant import ParkingController
from rollnest import AsyncStrategy, Capacity, Engine, PauseMode, Prompt, Rollout, Sampling, TaskSpec
from rollnest.abc import Instrument
from rollnest.testing import (
    Reply,
    ScriptedController,
    assert_conserved,
    virtual_backends,
)

FLOOR_GOALS = {512: 6.0, 8192: 10.0}


async def endless(rollout: Rollout) -> None:
    """A loop with a turn after each turn, so that a turn that ended in a pause is followed by one that parks."""
    while True:
        await rollout.generate()


class Answering(Instrument):
    """Has the policy answer as soon as a pause begins that waits for it."""

    def __init__(self, controller: ParkingController) -> None:
        self._controller = controller

    def gate_closed(self, in_flight: int) -> None:
        """The gate closed."""
        self._controller.answer()


async def pause(
    turns: int,
    mode: PauseMode,
    rounds: int,
    *,
    tokens: int = 16,
    packed: bool = False,
    stalls: bool = False,
) -> list[float]:
    """Milliseconds until the block is entered; with `stalls`, the longest turn of the event loop until then."""
    group_size = min(turns, 8)
    groups = max(1, turns // group_size)
    prompts = [Prompt(str(n), token_ids=[1, 2]) for n in range(groups)]
    task = TaskSpec(
        "t",
        prompts,
        judger=None,
        loop=endless,
        group_size=group_size,
        sampling=Sampling(900_000),
        max_response_tokens=900_000,
    )
    taken: list[float] = []
    controller = ParkingController(tokens, packed=packed)
    instruments = [Answering(controller)] if mode is PauseMode.WAIT else []
    async with (
        Engine(controller, task, capacity=Capacity(turns=None), instruments=instruments) as engine,
        create_task_group() as tasks,
    ):
        tasks.start_soon(engine.next_batch, groups)
        for _ in range(rounds):
            await until(lambda: len(controller.open) == turns)
            calm()
            watch = Watch()
            if stalls:
                await tasks.start(watch.run)
            started = now()
            async with engine.paused(mode):
                taken.append(watch.stop() if stalls else (now() - started) * 1e3)
        tasks.cancel_scope.cancel()
    return taken


async def late_request(turns: int = 64, admission: float = 0.2) -> float:
    """Virtual seconds to quiet, if requests reach the server so long after they were sent, and miss the abort.

    Raises:
        AssertionError: A token was lost, or the server worked on while it was paused.
    """
    server = ScriptedController(lambda _: Reply([1] * 64, delay=60.0), admission=admission)
    task = TaskSpec(
        "t",
        [Prompt("p", token_ids=[1, 2])],
        judger=None,
        sampling=Sampling(64),
        strategy=AsyncStrategy(max_staleness=1),
    )
    async with Engine(server, task, batch_size=turns // 8) as engine:
        await until(lambda: len(server.open) == turns)
        async with engine.paused() as paused:
            quiet = paused.quiet_seconds
            if server.while_paused or paused.turns_in_flight != turns:
                raise AssertionError(f"{server!r} with {paused.turns_in_flight} turns in flight")
    assert_conserved(engine, committed=server.committed)
    return quiet


def run(quick: bool) -> list[Row]:
    """Runs every case."""
    rows: list[Row] = []
    for backend in BACKENDS:
        rows += in_flight(backend, (1, 64, 512) if quick else (1, 64, 512, 2048, 8192), quick)
        rows += large_replies(backend, quick)
    for make in virtual_backends():
        backend, options = make()
        quiet = anyio.run(late_request, backend=backend, backend_options=options)
        case = f"{backend}, a request 200 ms late, virtual time"
        rows.append(row(case, "s", [quiet], at_most=0.5))
    return rows


def in_flight(
    backend: str, sizes: Sequence[int], quick: bool, modes: Iterable[PauseMode] = PauseMode
) -> list[Row]:
    """Every mode with every number of turns in flight."""
    rows: list[Row] = []
    for turns in sizes:
        rounds = 5 if quick else 10 if turns == 2048 else 50
        floor: list[float] = []
        cancel: list[float] = []
        nest: list[float] = []
        of: dict[PauseMode, list[float]] = {mode: [] for mode in modes}
        # In turns of some rounds, so that all see the same machine; each on a loop of its own, so that the floor
        # does not pay for what the engine keeps.
        some = 10 if turns < 8192 else 25
        for start in range(0, rounds, some):
            few = min(some, rounds - start)
            floor += anyio.run(bare_floor, turns, few, backend=backend)
            cancel += anyio.run(bare_cancel, turns, few, backend, backend=backend)
            nest += anyio.run(bare_evict, turns, min(few, 10), backend=backend)
            for mode, taken in of.items():
                # 8,192 take seconds: fewer rounds of what has no goal beside the floor.
                least = few if turns < 8192 or mode is PauseMode.ABORT else min(few, 4)
                taken += anyio.run(pause, turns, mode, least, backend=backend)
        where = f"{turns:,} turns in flight"
        for mode, taken in of.items():
            goal = FLOOR_GOALS.get(turns) if mode is PauseMode.ABORT else None
            case = f"{backend}, {mode.name}, {where}"
            rows.append(row(case, "ms", taken, baseline=floor, at_most_ratio=goal))
        abort = of[PauseMode.ABORT]
        case = f"{backend}, ABORT, {where}, against cancelling bare tasks"
        rows.append(row(case, "ms", abort, baseline=cancel))
        for mode, taken in of.items():
            if mode.name == "EVICT" and turns in FLOOR_GOALS:
                case = f"{backend}, EVICT, {where}, against ABORT"
                rows.append(row(case, "ms", taken, baseline=abort, at_most_ratio=3.0))
                case = f"{backend}, EVICT, {where}, against cancelling a bare nest"
                rows.append(row(case, "ms", taken, baseline=nest))
        if turns in FLOOR_GOALS:
            rows.append(stall(backend, turns, min(rounds, 10)))
    return rows


def stall(backend: str, turns: int, rounds: int) -> Row:
    """What the user's event loop sees of a pause: its longest turn."""
    bare = anyio.run(bare_stall, turns, rounds, backend=backend)
    measured = partial(pause, turns, PauseMode.ABORT, rounds, stalls=True)
    return row(
        f"{backend}, ABORT, {turns:,} turns in flight: longest turn of the event loop",
        "ms",
        anyio.run(measured, backend=backend),
        baseline=bare,
    )


def large_replies(backend: str, quick: bool) -> list[Row]:
    """512 replies of 4,096 tokens that arrive at once, decoded already, or as lists of Python numbers."""
    rows: list[Row] = []
    for packed, words, rounds, goal in (
        (True, "as packed columns", 50, 100.0),
        (False, "as lists of numbers", 10, None),
    ):
        taken: list[float] = []
        while len(taken) < (5 if quick else rounds):  # new engines, because the responses grow
            measured = partial(pause, 512, PauseMode.ABORT, 5, tokens=4096, packed=packed)
            taken += anyio.run(measured, backend=backend)
        case = f"{backend}, ABORT, 512 replies of 4,096 tokens, {words}"
        rows.append(row(case, "ms", taken, at_most=goal))
    return rows


if __name__ == "__main__":
    main("pause_latency", run)
