"""Rollouts through the vLLM controller against a fast server, beside bare HTTP clients that post the same.

One rollout is one request: 8 prompt tokens and 16 new ones, unless said otherwise. The server is a process of its own,
answers at once, and does nothing else (`benches.http_server`). The bare clients send the same bodies, read the whole
answer and decode its JSON; they check nothing and keep nothing. All take turns in one run.

- wall time and CPU time of this process for each rollout, with 64, 512 and 2,048 requests at once
- what a pause takes beyond the server's own answer, while it holds 2,048 requests
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from typing import Any

import aiohttp
import anyio
import httpx2
from attrs import frozen

from benches.harness import BACKENDS, Row, calm, main, now, row
from benches.http_server import HELD, PAUSE
from rollnest import Attempt, PauseMode, Sampling
from rollnest_adapters.vllm import VllmController

GOAL = 0.7
"""Of the bare httpx2 client's rollouts per second."""


@frozen
class Load:
    """What is asked of the server."""

    name: str
    at_once: int
    rollouts: int
    prompt: int = 8
    tokens: int = 16

    def body(self) -> dict[str, Any]:
        """What the bare clients post; the controller makes its own."""
        sampling = {"max_tokens": self.tokens, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        return {
            "request_id": "0" * 32,
            "token_ids": list(range(1, self.prompt + 1)),
            "sampling_params": {**sampling, "min_p": 0.0, "logprobs": 0},
            "cache_salt": "rollnest-0",
        }

    def attempt(self) -> Attempt:
        """What the controller is given."""
        return Attempt(
            range(1, self.prompt + 1),
            max_tokens=self.tokens,
            sampling=Sampling(self.tokens),
            affinity="rollout",
        )


@contextmanager
def serving() -> Any:
    """The server; its root."""
    command = [sys.executable, "-m", "benches.http_server"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


async def crowd(load: Load, post: Callable[[], Awaitable[object]], rollouts: int) -> None:
    """So many rollouts, so many at once."""
    left = iter(range(rollouts))

    async def one_after_the_other() -> None:
        for _ in left:
            await post()

    async with anyio.create_task_group() as tasks:
        for _ in range(load.at_once):
            tasks.start_soon(one_after_the_other)


async def measured(
    load: Load, post: Callable[[], Awaitable[object]], rounds: int
) -> list[tuple[float, float]]:
    """Milliseconds of wall and CPU time for each rollout, round by round; the first round opens the connections."""
    await crowd(load, post, load.at_once)
    found: list[tuple[float, float]] = []
    for _ in range(rounds):
        calm()
        wall, cpu = now(), time.process_time()
        await crowd(load, post, load.rollouts)
        per = 1e3 / load.rollouts
        found.append(((now() - wall) * per, (time.process_time() - cpu) * per))
    return found


async def by_controller(url: str, load: Load, rounds: int) -> list[tuple[float, float]]:
    """The vLLM controller."""
    async with VllmController(url) as controller:
        found = await measured(load, lambda: controller.generate(load.attempt()), rounds)
        assert controller.tokens_committed >= load.rollouts * load.tokens
        return found


async def by_httpx2(url: str, load: Load, rounds: int) -> list[tuple[float, float]]:
    """A bare httpx2 client, with limits that suit."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=None) as client:
        body = load.body()

        async def post() -> object:
            answer = await client.post("/inference/v1/generate", json=body)
            return answer.json()

        return await measured(load, post, rounds)


async def by_aiohttp(url: str, load: Load, rounds: int) -> list[tuple[float, float]]:
    """A bare aiohttp client, with limits that suit; asyncio only."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        body = load.body()

        async def post() -> object:
            async with client.post(f"{url}/inference/v1/generate", json=body) as answer:
                return json.loads(await answer.read())

        return await measured(load, post, rounds)


async def pause_beyond(url: str, at_once: int, rounds: int) -> list[float]:
    """Milliseconds of a pause beyond the server's own answer, while it holds so many requests."""
    found: list[float] = []
    load = Load("held", at_once, at_once, tokens=HELD)
    async with VllmController(url) as controller:
        for _ in range(rounds):
            async with anyio.create_task_group() as tasks:
                for _ in range(at_once):
                    tasks.start_soon(controller.generate, load.attempt())
                await anyio.sleep(5.0)  # until all have been sent
                calm()
                started = now()
                await controller.pause(PauseMode.KEEP)
                found.append((now() - started - PAUSE) * 1e3)
                await controller.resume()
    return found


def run(quick: bool) -> list[Row]:
    """Runs every load on both backends."""
    rounds = 2 if quick else 5
    share = 4 if quick else 1
    loads = [
        Load("64 at once", 64, 4096 // share),
        Load("512 at once", 512, 4096 // share),
        Load("2,048 at once", 2048, 8192 // share),
        Load("64 at once, 4k-token replies", 64, 512 // share, tokens=4096),
        Load("64 at once, 32k-token prompts", 64, 512 // share, prompt=32_768),
    ]
    rows: list[Row] = []
    with serving() as url:
        for backend in BACKENDS:
            for load in loads:
                rows += compared(url, load, rounds, backend)
            beyond = anyio.run(pause_beyond, url, 2048, rounds, backend=backend)
            rows.append(
                row(
                    f"{backend}: pause, beyond the server's answer, 2,048 in flight",
                    "ms",
                    beyond,
                    at_most=50.0,
                )
            )
    return rows


def compared(url: str, load: Load, rounds: int, backend: str) -> list[Row]:
    """One load through the controller and through the bare clients."""
    ours = anyio.run(by_controller, url, load, rounds, backend=backend)
    bare = anyio.run(by_httpx2, url, load, rounds, backend=backend)
    name = f"{backend}: {load.name}"
    rows = [
        row(
            f"{name}: wall per rollout, to httpx2",
            "ms",
            [wall for wall, _ in ours],
            baseline=[wall for wall, _ in bare],
            at_most_ratio=1 / GOAL,
        ),
        row(
            f"{name}: CPU per rollout, to httpx2",
            "ms",
            [cpu for _, cpu in ours],
            baseline=[cpu for _, cpu in bare],
        ),
    ]
    if backend == "asyncio":
        other = anyio.run(by_aiohttp, url, load, rounds, backend=backend)
        rows.append(
            row(
                f"{name}: wall per rollout, to aiohttp",
                "ms",
                [wall for wall, _ in ours],
                baseline=[wall for wall, _ in other],
            )
        )
    return rows


if __name__ == "__main__":
    main("http", run)
