"""Tokens per second of the transformers controller, beside `model.generate` and beside transformers' own attention.

    python benches/bench_transformers.py [requests] [tokens] [threads]

One Llama of 0.9M parameters (4 layers, width 128, vocabulary 64), random weights, temperature 1, prompts of 8 tokens.
The three take turns in one process; medians and best of the rounds, by the clock and by processor time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any
from unittest import mock

import anyio
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollnest import Attempt, Sampling
from rollnest_adapters import _cb_attention
from rollnest_adapters.transformers import TransformersController

ROUNDS = 5


def model() -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    llama: Any = LlamaForCausalLM(LlamaConfig(**settings))
    return llama.eval()


def prompt(i: int) -> list[int]:
    return [1, 2, 3, 4, 5, 6, 7, 8 + i % 50]


async def through_controller(policy: TransformersController, requests: int, tokens: int) -> None:
    sampling = Sampling(tokens)
    async with anyio.create_task_group() as tasks:
        for i in range(requests):
            attempt = Attempt(prompt(i), max_tokens=tokens, sampling=sampling)
            tasks.start_soon(policy.generate, attempt)


async def plain_generate(llama: Any, requests: int, tokens: int) -> None:
    ids = torch.tensor([prompt(i) for i in range(requests)])
    llama.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,  # what logprobs are made from
    )


async def measure(requests: int, tokens: int) -> dict[str, list[tuple[float, float]]]:
    llama = model()
    found: dict[str, list[tuple[float, float]]] = {}
    async with AsyncExitStack() as stack:
        policy = await stack.enter_async_context(TransformersController(model()))
        with mock.patch.object(_cb_attention, "fits", return_value=False):
            # Its mask has a column for every token of the cache, so that is kept small.
            stock = await stack.enter_async_context(
                TransformersController(model(), num_blocks=2048)
            )
        ways: dict[str, Callable[[], Awaitable[None]]] = {
            "controller": lambda: through_controller(policy, requests, tokens),
            "controller, transformers' own attention": lambda: through_controller(
                stock, requests, tokens
            ),
            "model.generate, one batch": lambda: plain_generate(llama, requests, tokens),
        }
        for turn in range(ROUNDS + 1):
            for name, way in ways.items():
                clock, processor = time.perf_counter(), time.process_time()
                await way()
                took = time.perf_counter() - clock, time.process_time() - processor
                if turn:  # the first one warms up
                    found.setdefault(name, []).append(took)
    return found


def main() -> None:
    requests, tokens, threads = (
        int(given) if given else default
        for given, default in zip([*sys.argv[1:], "", "", ""][:3], (512, 28, 1), strict=True)
    )
    torch.set_num_threads(threads)
    found = anyio.run(measure, requests, tokens)
    out = sys.stdout
    out.write(f"{requests} requests of {tokens} tokens, {threads} threads, {ROUNDS} rounds\n")
    out.write(f"{'':42}{'tokens/s: median':>18}{'best':>9}{'per cpu-second':>17}\n")
    for name, rounds in found.items():
        total = requests * tokens
        clock = sorted(total / c for c, _ in rounds)
        processor = statistics.median(total / p for _, p in rounds)
        out.write(f"{name:42}{statistics.median(clock):18.0f}{clock[-1]:9.0f}{processor:17.0f}\n")


if __name__ == "__main__":
    main()
