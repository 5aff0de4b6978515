"""One server for the whole suite; both event loops, on real clocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .place import MODELS
from .scoring import Scorer
from .server import Vllm, free_port


@pytest.fixture(scope="session")
def vllm() -> Iterator[Vllm]:
    """A server by the book, with the first model loaded."""
    with Vllm(free_port()) as server:
        yield server


@pytest.fixture(scope="session")
def exact() -> Iterator[Vllm]:
    """The same, but its logprobs are exact enough to tell of each token which weights made it."""
    with Vllm(free_port(), dtype="float32") as server:
        yield server


@pytest.fixture(scope="session")
def second() -> Iterator[Vllm]:
    """Another server, to be started, and killed."""
    server = Vllm(free_port())
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def lacking() -> Iterator[Vllm]:
    """A server without the options that rollnest needs."""
    with Vllm(free_port(), options=(), dev_mode=False) as server:
        yield server


@pytest.fixture(scope="session")
def scorers() -> tuple[Scorer, Scorer]:
    """Forward passes of both models."""
    # Threads that meet after each of a thousand small operations wait for one another, and for the server's.
    torch.set_num_threads(1)
    return Scorer(MODELS[0]), Scorer(MODELS[1])


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend
