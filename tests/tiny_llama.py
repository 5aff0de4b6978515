"""A tiny Llama for tests, and a brake on its forward passes."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import torch
from anyio.lowlevel import current_token
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 64


@pytest.fixture(scope="module")
def small_torch() -> Iterator[None]:
    """One thread, because others share the machine. And transformers collects garbage twice whenever a loop ends:
    with torch loaded that takes half a second, unless what stays anyway is taken out of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def tiny_llama(seed: int = 0, *, scale: float = 1.0, **options: Any) -> Any:
    """Returns a random Llama of 40k parameters; the same for the same seed.

    `scale` multiplies the head: above 1 its distributions are sharper than a random model's nearly uniform ones.
    """
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.2,
        **options,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return model.eval()


class Brake:
    """Counts a model's forward passes, and can hold one up."""

    def __init__(self, model: Any) -> None:
        self.passes = 0
        self._left: int | None = None
        self._changed = threading.Condition()
        self._stalled: Any = None
        model.register_forward_pre_hook(self._before)

    @asynccontextmanager
    async def stall(self, *, after: int) -> AsyncIterator[Brake]:
        """Lets `after` forward passes through and holds up the next one until the block is left."""
        native: Any = current_token().native_token
        call_soon = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon
        event = anyio.Event()
        with self._changed:
            self._left = after
            self._stalled = lambda: call_soon(event.set)
            self._event = event
        try:
            yield self
        finally:
            self.let_go()

    async def reached(self) -> None:
        await self._event.wait()

    def let_go(self) -> None:
        with self._changed:
            self._left = None
            self._changed.notify_all()

    def _before(self, *_: Any) -> None:
        with self._changed:
            self.passes += 1
            if self._left == 0:
                self._stalled()
                assert self._changed.wait_for(lambda: self._left != 0, timeout=60)
            if self._left is not None:
                self._left -= 1
