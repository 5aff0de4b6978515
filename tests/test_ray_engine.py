"""An engine in an actor, and trainers that use it, leave it in the lurch, and die."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rollnest import AsyncStrategy, Engine, PauseMode, Prompt, Sampling, TaskSpec
from rollnest.errors import EngineBusy, EngineClosed
from rollnest.testing import ScriptedController, check_sample
from rollnest_adapters.ray import RayCallFailed, RayEngine, RayOptions

from .ray_actors import HANG, remote

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

LIGHT = RayOptions(num_cpus=0)
OWN = {"rollnest controller", "rollnest production", "rollnest prober", "producer task"}


async def solve(rollout: Any) -> None:
    await rollout.generate()


async def never(rollout: Any) -> None:
    """Of no prompt there is a second batch."""
    await rollout.generate()
    if rollout.prompt.uid not in ("p0", "p1"):
        import anyio

        await anyio.sleep_forever()


def make(loop: Any = solve) -> Engine:
    prompts = [Prompt(f"p{i}", token_ids=[1 + i, 2]) for i in range(64)]
    task = TaskSpec(
        "task",
        prompts,
        judger=None,
        loop=loop,
        group_size=2,
        sampling=Sampling(4),
        shuffle=False,
        strategy=AsyncStrategy(max_staleness=8),
    )
    return Engine(ScriptedController(), task, batch_size=2)


def make_stuck() -> Engine:
    return make(never)


def make_nothing() -> Engine:
    raise KeyError("no weights here")


def until(true: Callable[[], bool]) -> None:
    """Waits for a condition in another process."""
    by = time.monotonic() + HANG
    while not true():
        assert time.monotonic() < by
        time.sleep(0.01)


def state(engine: RayEngine) -> Any:
    return ray.get(engine.actor.state.remote())


@pytest.fixture(scope="module")
def engine(local_ray: None) -> Iterator[RayEngine]:
    """One for all tests that leave it as it was."""
    with RayEngine.start(make, options=LIGHT) as engine:
        yield engine


def test_a_trainer_has_all_it_needs(engine: RayEngine, tmp_path: Path) -> None:
    batch = engine.next_batch(2)
    for sample in batch.samples:
        check_sample(sample)
    assert batch.statistics.samples == 4
    with engine.paused(PauseMode.ABORT, grace=1.0) as pause:
        assert pause.quiet_seconds >= 0
        pause.keep()
        pause.update_weights({"w": 1}, engine.version + 1)
        with pytest.raises(EngineBusy, match="another trainer"):
            with engine.paused():
                pass
    with engine.paused() as pause:
        pause.published(engine.version + 1)
    assert engine.statistics().version == engine.version == 2
    assert "task 'task'" in str(engine.tree())
    assert Path(engine.save(tmp_path)).is_dir()
    engine.commit(batch)
    assert len(engine.evaluate("task", limit=3).groups) == 3
    assert engine.next_batch(2).index == batch.index + 1
    assert (state(engine).calls, state(engine).paused) == ((), None)


def test_a_batch_that_did_not_come_is_handed_over_again(engine: RayEngine) -> None:
    first = engine.next_batch(2)
    lost = ray.get(engine.actor.next_batch.remote(2, first.index, False))
    again = engine.next_batch(2)
    assert again.index == lost.index == first.index + 1
    assert [g.prompt.uid for g in again.groups] == [g.prompt.uid for g in lost.groups]
    assert engine.next_batch(2).index == again.index + 1


def test_a_trainer_that_died_in_a_pause_stops_production_for_its_lease_only(
    engine: RayEngine,
) -> None:
    trainer = remote(Trainer).remote(engine)
    ray.get(trainer.pause.remote(0.2))
    assert state(engine).paused is not None
    ray.kill(trainer)
    until(lambda: state(engine).paused is None)
    engine.next_batch(2)
    # One that lives, and comes late, is told.
    info = ray.get(engine.actor.pause.remote(PauseMode.ABORT, 1.0, (), 0.05))
    until(lambda: state(engine).paused is None)
    with pytest.raises(EngineBusy, match=rf"pause {info.number} is over"):
        ray.get(engine.actor.in_pause.remote(info.number, "published", (9,)))


class Trainer:
    """Uses an engine that somebody else owns."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine
        self._pause: Any = None

    def pause(self, lease: float) -> None:
        """Begins a pause and does not end it."""
        self._pause = self._engine.paused(lease=lease)
        self._pause.__enter__()

    def wait(self) -> None:
        """Waits for a batch that does not come."""
        self._engine.next_batch(2)


def test_a_call_that_is_cancelled_or_whose_trainer_dies_leaves_nothing_behind() -> None:
    with RayEngine.start(make_stuck, options=LIGHT) as engine:
        engine.commit(engine.next_batch(2))
        trainer = remote(Trainer).remote(engine)
        trainer.wait.remote()
        until(lambda: state(engine).calls == ("next_batch",))
        ray.kill(trainer)
        # The dead trainer's call waits on, until another one's takes its place.
        third = engine.actor.next_batch.remote(2, 1, False)
        fourth = engine.actor.next_batch.remote(2, 1, False)
        with pytest.raises(EngineBusy, match="another trainer asks for batches now"):
            ray.get(third)
        ray.cancel(fourth)
        until(lambda: state(engine).calls == ())
        assert engine.statistics().total("delivered") == 2


def test_what_making_the_engine_raised_is_raised() -> None:
    with pytest.raises(KeyError, match="no weights here"):
        RayEngine.start(make_nothing, options=LIGHT)
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"make must be picklable.*lock"):
        RayEngine.start(lambda: lock and make(), options=LIGHT)


def test_after_the_end_the_actor_is_gone() -> None:
    engine = RayEngine.start(make, options=LIGHT)
    with pytest.raises(ZeroDivisionError), engine:
        1 / 0  # noqa: B018
    with pytest.raises((RayCallFailed, EngineClosed)):
        engine.next_batch(2)
