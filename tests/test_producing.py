"""How far production runs ahead, and what becomes of groups that are too old."""

from __future__ import annotations

from typing import Literal

import anyio
import pytest

from rollnest import AsyncStrategy, Engine, SyncStrategy
from rollnest.testing import ScriptedController, assert_conserved

from .helpers import spec

pytestmark = pytest.mark.anyio


async def test_oversampling_starts_a_share_on_top() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy(max_staleness=1, oversample=0.5))
    async with Engine(controller, task, batch_size=3) as engine:
        await anyio.sleep(100)
        assert engine.statistics().tasks["task"].ready == 5  # 3 and ceil(1.5)
        await engine.next_batch()
        await anyio.sleep(100)
        assert engine.statistics().tasks["task"].ready == 5  # what was not taken stays for later
    assert_conserved(engine, committed=controller.committed)


async def test_what_is_too_old_may_be_dropped() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy(max_staleness=0, lead=1, expired="drop"))
    async with Engine(controller, task, batch_size=2) as engine:
        await anyio.sleep(100)
        async with engine.paused() as pause:
            await pause.update_weights({})
        batch = await engine.next_batch()
        assert set(batch.statistics.lag_histogram) == {0}
        assert batch.statistics.dropped == {"expired": 4}
    figures = engine.statistics().tasks["task"]
    assert figures.dropped["expired"] == 4
    assert figures.redrawn == 0
    assert_conserved(engine, committed=controller.committed)


async def test_a_pause_while_a_batch_is_awaited_makes_sync_groups_too_old() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    ways: list[tuple[Literal["retry", "drop"], int]] = [("retry", 1), ("drop", 0)]
    for expired, redrawn in ways:
        task = spec(group_size=1, strategy=SyncStrategy(expired=expired))
        async with Engine(controller, task) as engine, anyio.create_task_group() as group:
            group.start_soon(engine.next_batch, 1)
            await anyio.sleep(5)
            async with engine.paused() as pause:
                await pause.update_weights({}, engine.version + 1)
        assert engine.statistics().total("redrawn") == redrawn
        controller = ScriptedController(rate=1.0, stop_every=10_000)


@pytest.mark.parametrize(
    ("name", "value"), [("oversample", -1), ("expired", "tail"), ("lead", -0.5), ("lead", "two")]
)
async def test_bad_options_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        AsyncStrategy(**{name: value})  # type: ignore[arg-type]
