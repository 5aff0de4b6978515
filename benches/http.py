"""Rollouts through the vLLM controller against a fast server, beside bare HTTP clients that post the same.

One rollout is one request: 8 prompt tokens and 16 new ones, unless said otherwise. The server is a process of its own,
answers at once, and does nothing else (`benches.http_server`). The bare clients send the same bodies, read the whole
answer and decode its JSON; they check nothing and keep nothing. They come one after the other in one run, each with its
connections open before it is measured; of a client that is slow fewer rounds are taken, so that all is done within ten
minutes.

- wall time and CPU time of this process for each rollout, with 64, 512 and 2,048 requests at once
- connections that the server saw opened: as many as there are requests at once, because each is used again
- what a pause takes beyond the server's own answer, while it holds 2,048 requests: until the pause is confirmed, and
  until the partials of all are recorded
"""

from __future__ import annotations

import json
import re
import resource
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
from benches.http_server import HELD, OPENED, PAUSE, RUNNING
from rollnest import Attempt, PauseMode, Sampling
from rollnest_adapters.vllm import VllmController

GOAL = 0.7
"""Of the bare httpx2 client's rollouts per second."""

ENOUGH = 10.0
"""Seconds of one client under one load, after which it begins no further round."""

FILES = 8192
"""Files that this process and the server may have open, if the system lets them."""


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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        enough = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard))
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


@frozen
class Taken:
    """What one client took under one load.

    Attributes:
        wall: Milliseconds for each rollout, round by round.
        cpu: The same of this process's CPU time.
        opened: Connections that were opened for the rollouts before the first round.
    """

    wall: list[float]
    cpu: list[float]
    opened: int


async def measured(
    url: str,
    load: Load,
    post: Callable[[], Awaitable[object]],
    rounds: int,
    *,
    before: int = 1,
) -> Taken:
    """Measures round by round, after `before` rollouts on each connection, which has to be opened for the first."""
    opened = await figure(url, OPENED)
    await crowd(load, post, before * load.at_once)
    opened = await figure(url, OPENED) - opened - 1  # one of them asks for the figure
    began = now()
    wall: list[float] = []
    cpu: list[float] = []
    while not wall or (len(wall) < rounds and now() - began < ENOUGH):
        calm()
        started, worked = now(), time.process_time()
        await crowd(load, post, load.rollouts)
        per = 1e3 / load.rollouts
        wall.append((now() - started) * per)
        cpu.append((time.process_time() - worked) * per)
    return Taken(wall, cpu, int(opened))


async def figure(url: str, name: str) -> float:
    """A figure that the server keeps."""
    async with httpx2.AsyncClient(timeout=60.0) as client:
        metrics = (await client.get(f"{url}/metrics")).text
    found = re.search(rf"^{name} (\d+)$", metrics, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def by_controller(url: str, load: Load, rounds: int) -> Taken:
    """The vLLM controller."""
    async with VllmController(url) as controller:
        found = await measured(
            url, load, lambda: controller.generate(load.attempt()), rounds, before=3
        )
        assert controller.tokens_committed >= load.rollouts * load.tokens
        return found


async def by_httpx2(url: str, load: Load, rounds: int) -> Taken:
    """A bare httpx2 client, with limits that suit."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=None) as client:
        body = load.body()

        async def post() -> object:
            answer = await client.post("/inference/v1/generate", json=body)
            return answer.json()

        return await measured(url, load, post, rounds)


async def by_aiohttp(url: str, load: Load, rounds: int) -> Taken:
    """A bare aiohttp client, with limits that suit; asyncio only."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        body = load.body()

        async def post() -> object:
            async with client.post(f"{url}/inference/v1/generate", json=body) as answer:
                return json.loads(await answer.read())

        return await measured(url, load, post, rounds)


@frozen
class Beyond:
    """What pauses took beyond the server's own answer, in milliseconds.

    Attributes:
        confirmed: Until the controller said that it is paused.
        recorded: Until the partials of all requests that it ended were recorded.
    """

    confirmed: list[float]
    recorded: list[float]


async def pause_beyond(url: str, mode: PauseMode, at_once: int, rounds: int) -> Beyond:
    """Pauses the server while it holds so many requests. With `KEEP` they stay where they are; `ABORT` ends them all.

    The server lets the partials go right after it has confirmed the pause, so both come at the same time.
    """
    found = Beyond([], [])
    load = Load("held", at_once, at_once, tokens=HELD)
    async with VllmController(url) as controller:
        for _ in range(rounds):
            started = 0.0
            async with anyio.create_task_group() as tasks:
                for _ in range(at_once):
                    tasks.start_soon(controller.generate, load.attempt())
                while await figure(url, RUNNING) < at_once:  # noqa: ASYNC110 - it tells nobody by itself
                    await anyio.sleep(0.1)
                calm()
                started = now()
                await controller.pause(mode)
                found.confirmed.append((now() - started - PAUSE) * 1e3)
                if mode is PauseMode.KEEP:
                    await controller.resume()
            if mode is not PauseMode.KEEP:
                found.recorded.append((now() - started - PAUSE) * 1e3)
                await controller.resume()
    return found


async def bare_abort(url: str, at_once: int, rounds: int) -> list[float]:
    """What a bare httpx2 client takes, beyond the server's answer, until it has read all that the abort has ended."""
    found: list[float] = []
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    body = Load("held", at_once, at_once, tokens=HELD).body()
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=None) as client:

        async def post() -> None:
            (await client.post("/inference/v1/generate", json=body)).json()

        for _ in range(rounds):
            async with anyio.create_task_group() as tasks:
                for _ in range(at_once):
                    tasks.start_soon(post)
                while await figure(url, RUNNING) < at_once:  # noqa: ASYNC110 - it tells nobody by itself
                    await anyio.sleep(0.1)
                calm()
                started = now()
                await client.post("/pause", params={"mode": "abort"})
            found.append((now() - started - PAUSE) * 1e3)
            await client.post("/resume")
    return found


def loads(quick: bool) -> list[Load]:
    """What is asked of the server; a look asks for less, and only for 64 at once."""
    share = 8 if quick else 1
    many = [Load("512 at once", 512, 2048), Load("2,048 at once", 2048, 2048)]
    return [
        Load("64 at once", 64, 4096 // share),
        *([] if quick else many),
        Load("64 at once, 4k-token replies", 64, 512 // share, tokens=4096),
        Load("64 at once, 32k-token prompts", 64, 512 // share, prompt=32_768),
    ]


def run(quick: bool) -> list[Row]:
    """Runs every load on both backends."""
    rounds, at_once = (1, 256) if quick else (5, 2048)
    rows: list[Row] = []
    with serving() as url:
        for backend in BACKENDS:
            for load in loads(quick):
                rows += compared(url, load, rounds, backend)
            keep = anyio.run(pause_beyond, url, PauseMode.KEEP, at_once, rounds, backend=backend)
            abort = anyio.run(pause_beyond, url, PauseMode.ABORT, at_once, rounds, backend=backend)
            bare = anyio.run(bare_abort, url, at_once, rounds, backend=backend)
            rows += pause_rows(backend, at_once, keep, abort, bare)
    return rows


def pause_rows(
    backend: str, at_once: int, keep: Beyond, abort: Beyond, bare: list[float]
) -> list[Row]:
    """What a pause takes: 50 ms until it is confirmed, and no more than a bare client until all partials are there."""
    beyond = f"beyond the server's answer, {at_once:,} in flight"
    recorded = f"{backend}: ABORT, until all partials are recorded, {beyond}"
    return [
        row(f"{backend}: KEEP, {beyond}", "ms", keep.confirmed, at_most=50.0),
        row(
            f"{backend}: ABORT, until it is confirmed, {beyond}",
            "ms",
            abort.confirmed,
            at_most=50.0,
        ),
        row(recorded, "ms", abort.recorded, baseline=bare, at_most_ratio=1.0),
    ]


def compared(url: str, load: Load, rounds: int, backend: str) -> list[Row]:
    """One load through the controller and through the bare clients."""
    ours = anyio.run(by_controller, url, load, rounds, backend=backend)
    name = f"{backend}: {load.name}"
    rows = [
        row(
            f"{name}: connections opened for {3 * load.at_once:,} rollouts",
            "",
            [ours.opened],
            at_most=load.at_once,
        )
    ]
    clients = {"httpx2": by_httpx2}
    if backend == "asyncio":
        clients["aiohttp"] = by_aiohttp
    for client, by_client in clients.items():
        bare = anyio.run(by_client, url, load, rounds, backend=backend)
        goal = 1 / GOAL if client == "httpx2" else None
        rows += [
            row(
                f"{name}: wall per rollout, to {client}",
                "ms",
                ours.wall,
                baseline=bare.wall,
                at_most_ratio=goal,
            ),
            row(f"{name}: CPU per rollout, to {client}", "ms", ours.cpu, baseline=bare.cpu),
        ]
    return rows


if __name__ == "__main__":
    main("http", run)
