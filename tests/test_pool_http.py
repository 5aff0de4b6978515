"""A pool of vLLM controllers over real HTTP, of whose servers one is killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint

from rollnest import Attempt, Batch, Engine, Prompt, Sampling, Status, TaskSpec
from rollnest.testing import RecordingInstrument, assert_conserved, check_sample
from rollnest.testing.servers import VllmServer
from rollnest_adapters.pool import ControllerPool
from rollnest_adapters.vllm import VllmController

from .hand_clock import hand_backends

pytestmark = pytest.mark.anyio


@pytest.fixture(params=hand_backends(), ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    make: Callable[[], tuple[str, dict[str, Any]]] = request.param
    return make()


class Attempts(RecordingInstrument):
    """Keeps the attempts themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts: list[Attempt] = []

    def turn_started(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)


class Process:
    """A server that can be killed."""

    def __init__(self) -> None:
        self.server = VllmServer()
        self.up = anyio.Event()
        self._life = anyio.CancelScope()

    async def run(self) -> None:
        with self._life:
            async with self.server.serve():
                self.up.set()
                await anyio.sleep_forever()

    def kill(self) -> None:
        self._life.cancel()

    def asked(self) -> list[tuple[int, ...]]:
        """The ids of every request for tokens, but for the probe of the vocabulary."""
        return [
            tuple(body["token_ids"])
            for body in self.server.bodies
            if "logit_bias" not in body["sampling_params"]
        ]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await checkpoint()


async def test_one_of_two_servers_is_killed_under_a_hundred_rollouts() -> None:
    processes = {name: Process() for name in "ab"}
    heard = Attempts()
    prompts = [Prompt(f"p{i}", token_ids=[1 + i]) for i in range(100)]
    task = TaskSpec("task", prompts, judger=None, group_size=1, epochs=1, sampling=Sampling(20))
    batches: list[Batch] = []
    held: dict[tuple[int, ...], tuple[int, ...]] = {}
    async with create_task_group() as lives:
        for process in processes.values():
            lives.start_soon(process.run)
            await process.up.wait()
        controllers = {
            name: VllmController(process.server.url, stream_every=1, control_timeout=5.0)
            for name, process in processes.items()
        }
        pool = ControllerPool(controllers)
        engine = Engine(pool, task, instruments=[heard])
        a, b = processes["a"], processes["b"]
        async with engine:
            async with create_task_group() as tasks:

                async def take() -> None:
                    batches.append(await engine.next_batch(100))

                with a.server.stalled(after=12), b.server.stalled(after=12):
                    tasks.start_soon(take)
                    await until(lambda: len(heard.attempts) == 100)
                    await until(lambda: all(len(one.received) == 12 for one in heard.attempts))
                    at_a = set(a.asked())
                    for one in heard.attempts:
                        if tuple(one.prompt_ids) in at_a:
                            held[tuple(one.prompt_ids)] = tuple(one.received.ids)
                    assert len(held) >= 20
                    a.kill()
                    await until(lambda: len(b.asked()) == 100)
        (batch,) = batches
        assert len(batch) == 100
        assert all(sample.status is Status.COMPLETED for sample in batch.samples)
        for sample in batch.samples:
            check_sample(sample)
            assert len(sample.turns[0]) == 20
        asked = Counter([*a.asked(), *b.asked()])
        assert set(asked.values()) == {1}  # nothing was generated again from zero
        for prompt, received in held.items():
            assert asked[*prompt, *received] == 1
        assert engine.statistics().outages == engine.statistics().failed_requests == 0
        assert not heard.named("outage_began")
        assert_conserved(
            engine, committed=sum(one.tokens_committed for one in controllers.values())
        )
        lives.cancel_scope.cancel()
