"""A judger that blocks holds up its own group and nothing else, and a pause that evicts does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from anyio import create_task_group, sleep
from anyio.lowlevel import checkpoint

from rollnest import AsyncStrategy, Batch, Engine, Limits, PauseMode, ProcessJudger, Prompt, Sample
from rollnest.testing import ScriptedController, assert_conserved, free_running_threads

from . import judgers_in_processes as judgers
from .helpers import spec
from .test_processes import is_alive, until

pytestmark = pytest.mark.anyio

KINDS = ["async", "thread", "process"]


class Blocking:
    """A judger that blocks on the prompt with a label, until it is released or ended."""

    def __init__(self, kind: str, told: Path) -> None:
        self.told = told
        self.released = threading.Event()
        self.judger: Any = {
            "async": self.asynchronous,
            "thread": self.in_thread,
            "process": ProcessJudger(judgers.block),
        }[kind]

    async def asynchronous(self, sample: Sample) -> float:
        if sample.prompt.label is not None:
            self.told.touch()
            await sleep(60)
        return 1.0

    def in_thread(self, sample: Sample) -> float:
        if sample.prompt.label is not None:
            self.told.touch()
            assert self.released.wait(60)
        return 1.0

    @property
    def begun(self) -> Callable[[], bool]:
        return self.told.exists


def prompts(told: Path) -> list[Prompt]:
    blocked = Prompt("blocked", token_ids=[1, 2], label=str(told))
    return [blocked, *(Prompt(f"p{i}", token_ids=[i, 3]) for i in range(1, 5))]


async def take(got: list[Batch], engine: Engine, n: int) -> None:
    got.append(await engine.next_batch(n))


def blocked_by(blocking: Blocking) -> Any:
    return spec(
        judger=blocking.judger,
        prompts=prompts(blocking.told),
        shuffle=False,
        group_size=1,
        limits=Limits(judge=None),
        strategy=AsyncStrategy(lead=1),
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_a_batch_that_has_its_groups_is_returned_within_a_tick(
    kind: str, tmp_path: Path
) -> None:
    blocking = Blocking(kind, tmp_path / "told")
    got: list[Batch] = []
    async with (
        Engine(ScriptedController(), blocked_by(blocking), batch_size=2) as engine,
        create_task_group() as group,
    ):
        await until(lambda: blocking.begun() and engine.statistics().total("ready") == 3)
        group.start_soon(take, got, engine, 2)
        await checkpoint()  # it begins
        await checkpoint()  # its own checkpoint
        await checkpoint()
        (batch,) = got
        assert len(batch.groups) == 2
        assert "blocked" in {g.prompt for g in engine.tree().tasks["task"].groups}
        blocking.released.set()


@pytest.mark.parametrize("kind", KINDS)
async def test_evicting_takes_grace_and_no_longer(kind: str, tmp_path: Path) -> None:
    blocking = Blocking(kind, tmp_path / "told")
    controller = ScriptedController()
    is_thread = kind == "thread"
    expected = pytest.warns(RuntimeWarning, match="1 worker threads.*judger of task/blocked/0/0")
    with expected if is_thread else nullcontext(), free_running_threads():
        async with Engine(controller, blocked_by(blocking), batch_size=2, exit_grace=1.0) as engine:
            await until(lambda: blocking.begun() and engine.statistics().total("ready") == 3)
            async with engine.paused(PauseMode.EVICT, grace=2.0) as pause:
                assert pause.quiet_seconds == pytest.approx(2.0, abs=0.05)
                assert engine.statistics().total("waiting") == 1  # generated, and not judged
                slots = engine.tree().slots["judge"]
                if is_thread:
                    assert [h.name for h in slots.abandoned] == ["judger of task/blocked/0/0"]
                    assert slots.used == 1  # until it ends
                else:
                    assert slots.used == 0
                if kind == "process":
                    pids = [int(pid) for pid in blocking.told.read_text().split()]
                    await until(lambda: not any(map(is_alive, pids)))
            if not is_thread:
                blocking.told.unlink()
                await until(blocking.begun)  # asked again, from what was generated
    blocking.released.set()
    assert_conserved(engine, committed=controller.committed)
