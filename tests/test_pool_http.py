"""A pool of vLLM controllers over real HTTP, of whose servers one is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
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
from .vllm_process import STALLED

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


class Killable:
    """A server in a process of its own.

    Attributes:
        url: Its root.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        self._process, self._log = process, log
        self.url: str = process.stdout.readline().strip()

    def kill(self) -> None:
        """As `kill -9` does."""
        self._process.kill()

    def go_on(self) -> None:
        """Its requests stand still no longer."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def log(self) -> list[tuple[int, ...]]:
        """The ids of every request for tokens, as it wrote them down."""
        lines = self._log.read_text(encoding="utf-8").splitlines()
        return [tuple(json.loads(line)) for line in lines]


@contextmanager
def in_a_process(log: Path) -> Generator[Killable]:
    command = [sys.executable, "-m", "tests.vllm_process", str(log)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    ) as process:
        try:
            yield Killable(process, log)
        finally:
            process.kill()


async def test_one_of_two_processes_is_killed_under_a_hundred_rollouts(tmp_path: Path) -> None:
    heard = Attempts()
    prompts = [Prompt(f"p{i}", token_ids=[1 + i]) for i in range(100)]
    task = TaskSpec("task", prompts, judger=None, group_size=1, epochs=1, sampling=Sampling(20))
    batches: list[Batch] = []
    held: dict[tuple[int, ...], tuple[int, ...]] = {}
    with ExitStack() as processes:
        a, b = (processes.enter_context(in_a_process(tmp_path / name)) for name in "ab")
        pool = ControllerPool(
            {
                name: VllmController(server.url, stream_every=1)
                for name, server in (("a", a), ("b", b))
            }
        )
        engine = Engine(pool, task, instruments=[heard])
        async with engine, create_task_group() as tasks:

            async def take() -> None:
                batches.append(await engine.next_batch(100))

            tasks.start_soon(take)
            await until(lambda: [len(one.received) for one in heard.attempts] == [STALLED] * 100)
            at_a = set(a.log())
            held |= {
                tuple(one.prompt_ids): tuple(one.received.ids)
                for one in heard.attempts
                if tuple(one.prompt_ids) in at_a
            }
            assert len(held) >= 20
            a.kill()
            await until(lambda: len(b.log()) == 100)
            b.go_on()
        (batch,) = batches
        samples = list(batch.samples)
        assert all(sample.status is Status.COMPLETED for sample in samples)
        assert {sample.prompt.uid for sample in samples} == {prompt.uid for prompt in prompts}
        for sample in samples:
            check_sample(sample)
            assert len(sample.turns[0]) == 20
        asked = Counter([*a.log(), *b.log()])
        assert set(asked.values()) == {1}  # nothing was generated again from zero
        assert {(*prompt, *received) for prompt, received in held.items()} <= set(b.log())
        assert engine.statistics().total("tokens_lost") == 0
        assert_conserved(engine)
