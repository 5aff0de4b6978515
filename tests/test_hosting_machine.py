"""Drawn histories of an engine whose loops run on hosts that are killed at any moment: I1 to I11, I7 after each step.

The policy puts after any ids what follows from all of them, so a turn that went on from a wrong partial, or was given
again in a wrong place, is seen in the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import anyio
import pytest
from anyio import create_task_group, sleep
from anyio.lowlevel import checkpoint
from attrs import frozen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollnest import AsyncStrategy, Batch, Engine, Limits, PauseMode, Rollout, Sample, Sampling
from rollnest.hosting import HostedLoop
from rollnest.testing import (
    ScriptedController,
    assert_conserved,
    check_sample,
    expected_token,
    virtual_backends,
)

from .helpers import spec
from .local_hosts import LocalHosts

RATE, VOCAB = 1.0, 1000


async def play(rollout: Rollout, unit: float = 1.0) -> None:
    """Turns, tools that are async or in threads, parts side by side, and code of its own in between."""
    for _ in range(rollout.random.randrange(1, 4)):
        turn = await rollout.generate()
        if rollout.random.random() < 0.3:
            async with create_task_group() as tasks:
                for number in range(2):
                    tasks.start_soon(part, rollout, number, len(rollout.turns))
        if rollout.random.random() < 0.7:
            rollout.append([700 + await rollout.tool(count, len(turn), unit)])
        await sleep(unit * rollout.random.random())
    if rollout.random.random() < 0.2:
        rollout.finish("enough")


async def part(rollout: Rollout, number: int, turns: int) -> None:
    context = rollout.segment([30 + number, turns])
    await context.generate(max_tokens=3)
    context.append([600 + number])


async def count(number: int, unit: float) -> int:
    await sleep(0.5 * unit)
    return number


async def judge(sample: Sample) -> float:
    await checkpoint()
    return float(len(sample.segments[0]) % 2)


@frozen
class Do:
    """One step."""

    what: str
    seconds: float = 0.0
    mode: PauseMode = PauseMode.ABORT


STEPS = st.lists(
    st.one_of(
        st.builds(Do, st.just("sleep"), st.floats(0.0, 4.0)),
        st.builds(Do, st.just("kill")),
        st.builds(Do, st.just("kill all")),
        st.builds(Do, st.just("pause"), st.floats(0.0, 2.0), st.sampled_from(PauseMode)),
        st.builds(Do, st.just("pause and kill"), st.floats(0.0, 2.0), st.sampled_from(PauseMode)),
        st.builds(Do, st.just("take")),
    ),
    min_size=4,
    max_size=14,
)


def check_tokens(sample: Sample) -> None:
    """Every token is the one that must follow, whoever asked for it and however often it was cut."""
    for segment in sample.segments:
        ids = [*segment.prompt_ids]
        for token, origin, version in zip(
            segment.ids, segment.response.origin, segment.versions, strict=True
        ):
            if origin:
                assert token == expected_token(
                    ids,
                    vocab_size=VOCAB,
                    stop_id=0,
                    stop_every=16,
                    version=version,
                    salt=sample.uid,
                )
            ids.append(token)


class Killable(Protocol):
    """Hosts of any kind, as a history needs them."""

    kills: int

    def kill(self) -> None:
        """Kills the one that has the most to do."""

    async def orphans(self) -> list[str]:
        """What still runs there."""
        ...


async def history(
    hosts: HostedLoop, killable: Killable, steps: Sequence[Do], end: str, unit: float = 1.0
) -> Counter[str]:
    """Plays the steps, of so many seconds; returns what was seen."""
    controller = ScriptedController(rate=RATE / unit, vocab_size=VOCAB, stop_every=16)
    task = spec(
        loop=hosts,
        group_size=3,
        sampling=Sampling(5),
        judger=judge,
        strategy=AsyncStrategy(max_staleness=2),
        limits=Limits(sample=300.0),
    )
    seen: Counter[str] = Counter()
    batches: list[Batch] = []
    engine = Engine(controller, task, batch_size=2)

    def take_in(batch: Batch) -> None:
        batches.append(batch)
        for sample in batch.samples:
            check_sample(sample)
            check_tokens(sample)
            assert batch.version - (sample.oldest_version or 0) <= 2  # I9

    with anyio.CancelScope() as scope:
        async with engine:
            for step in steps:
                match step.what:
                    case "sleep":
                        await sleep(unit * step.seconds)
                    case "kill":
                        killable.kill()
                    case "kill all":
                        for _ in range(3):
                            killable.kill()
                    case "take":
                        take_in(await engine.next_batch(2))
                    case _:
                        async with engine.paused(step.mode, grace=unit * step.seconds) as pause:
                            if step.mode is not PauseMode.KEEP:
                                assert controller.open == {}
                            if step.what != "pause":
                                killable.kill()
                                await sleep(unit)
                            await pause.update_weights({})
                assert controller.while_paused == 0  # I10
                assert_conserved(engine, committed=controller.committed)  # I7
            async with engine.paused(PauseMode.EVICT, grace=0.0):
                assert await killable.orphans() == []
            if end == "cancel":
                scope.cancel()
            elif end == "take":
                take_in(await engine.next_batch(2))
    assert controller.open == {}
    assert_conserved(engine, committed=controller.committed)
    statistics = engine.statistics()
    assert statistics.total("flight") == 0
    visits = Counter((g.prompt.uid, g.visit) for batch in batches for g in batch.groups)
    assert max(visits.values(), default=1) == 1  # I8
    for name in ("replayed_turns", "resumed_turns", "diverged", "delivered"):
        seen[name] += statistics.total(name)
    seen["kills"] += killable.kills
    return seen


@pytest.mark.parametrize("make", virtual_backends(), ids=["asyncio", "trio"])
def test_any_history_of_killed_hosts_keeps_the_invariants(make: Any) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],  # shrinking takes a minute: do that by hand
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @given(STEPS, st.sampled_from(["take", "leave", "cancel"]), st.integers(1, 3))
    def run(steps: Sequence[Do], end: str, workers: int) -> None:
        backend, options = make()
        hosts = LocalHosts(play, workers)
        seen.update(
            anyio.run(
                history,
                hosts,
                hosts,
                steps,
                end,
                backend=backend,
                backend_options=options,
            )
        )

    run()
    assert seen["kills"] > 15
    assert seen["replayed_turns"] > 30
    assert seen["delivered"] > 15
    assert seen["diverged"] == 0
