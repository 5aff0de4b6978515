r"""GRPO with a live vLLM: rollouts over HTTP, training in this process, weights back by a reload.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --served-model-name policy --enable-scale-out \
        --generation-config vllm --logprobs-mode processed_logprobs
    python docs/examples/grpo_vllm.py --url http://127.0.0.1:8000 --model MODEL --steps 4

MODEL is a directory, such as SmolLM2-135M-Instruct: the server and this process both read it, and new weights go to
the server as a directory beside it. On a CPU its output head must not be tied to its embedding (`tests/live/model.py`
makes such a one), because vLLM 0.32 keeps a tied head when it reloads. What changes with a GPU:

- the trainer's model goes to its own device (`--device cuda:1`), or, with one GPU for both, is trained inside
  `engine.paused(release=("kv", "weights"))`, with vLLM's `--enable-sleep-mode`
- a directory is slow for large models: move the weights by NCCL or IPC inside the pause (vLLM's
  `--weight-transfer-config`), and say so with `pause.published(version)`; nothing else changes
- `Capacity(turns=...)` is what the server has room for, hundreds in place of 32
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollnest import (
    AsyncStrategy,
    Batch,
    Capacity,
    Engine,
    PauseMode,
    Prompt,
    Sample,
    Sampling,
    TaskSpec,
)
from rollnest.advantages import grpo
from rollnest_adapters.tokenizer import ChatTokenizer
from rollnest_adapters.torch import pad
from rollnest_adapters.vllm import VllmController

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def problems(count: int) -> list[Prompt]:
    """Sums; the label is the answer."""
    draw = random.Random(0)
    made: list[Prompt] = []
    for number in range(count):
        a, b = draw.randint(2, 20), draw.randint(2, 20)
        question = {"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}
        made.append(Prompt(f"sum-{number}", messages=[question], label=a + b))
    return made


async def judge(sample: Sample) -> float:
    """1 for the right number, a little for any number, and less for talking."""
    text = sample.turns[-1].text or ""
    numbers = re.findall(r"\d+", text)
    right = bool(numbers) and int(numbers[-1]) == sample.prompt.label
    return float(right) + 0.2 * bool(numbers) - 0.002 * len(sample.segments[0].response)


class Trainer:
    """A copy of the policy, and its optimizer. It knows nothing of the engine."""

    def __init__(self, directory: Path, device: str, rate: float) -> None:
        auto = cast("Any", AutoModelForCausalLM)
        self.model: Any = auto.from_pretrained(directory, dtype=torch.float32).to(device).train()
        self.tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(directory)
        self._optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self._device = device

    def step(self, batch: Batch) -> float:
        """One optimizer step; returns the share of tokens outside the clip range. Blocks."""
        rows = pad(batch, grpo, pad_token_id=self.tokenizer.eos_token_id).to(self._device)
        mask, tokens, outside = rows.mask, int(rows.mask.sum()), 0.0
        for at in range(len(rows.rows)):
            logits = self.model(
                input_ids=rows.input_ids[at : at + 1],
                attention_mask=rows.attention_mask[at : at + 1],
            ).logits[0][mask[at]]
            labels = rows.labels[at][mask[at]]
            new = logits.float().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
            ratio = (new - rows.logprobs[at][mask[at]]).exp()
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            advantages = rows.advantages[at][mask[at]]
            cast(
                "Any", -torch.minimum(ratio * advantages, clipped * advantages).sum() / tokens
            ).backward()
            outside += float((ratio != clipped).sum())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return outside / tokens

    def save(self, directory: Path) -> None:
        """Writes the weights as the server reads them: bfloat16, whole before anybody is told. Blocks."""
        state = {
            name: tensor.to(torch.bfloat16) for name, tensor in self.model.state_dict().items()
        }
        self.model.save_pretrained(directory, state_dict=state)
        self.tokenizer.save_pretrained(directory)


async def train(options: argparse.Namespace) -> None:
    """A batch, a step, new weights, again and again; the server generates meanwhile."""
    trainer = await anyio.to_thread.run_sync(Trainer, options.model, options.device, options.rate)
    tokenizer = ChatTokenizer(trainer.tokenizer)
    task = TaskSpec(
        "sums",
        problems(512),
        judger=judge,
        group_size=options.group_size,
        sampling=Sampling(options.max_tokens),
        strategy=AsyncStrategy(max_staleness=1),
    )
    controller = VllmController(options.url, stop_token_ids=tokenizer.stop_token_ids)
    async with controller:
        version = await controller.version() or 0  # the server may have been trained before
    async with Engine(
        VllmController(options.url, version=version, stop_token_ids=tokenizer.stop_token_ids),
        task,
        batch_size=options.groups,
        tokenizer=tokenizer,
        capacity=Capacity(turns=32),
        version=version,
    ) as engine:
        for step in range(options.steps):
            waited = time.perf_counter()
            batch = await engine.next_batch()
            began = time.perf_counter()
            lag = max(
                sample.lag(engine.version) for group in batch.groups for sample in group.samples
            )
            outside = await anyio.to_thread.run_sync(trainer.step, batch)
            directory = options.out / f"step-{step % 2}"  # the server holds one, the other is free
            await anyio.to_thread.run_sync(trainer.save, directory)
            trained = time.perf_counter()
            async with engine.paused(PauseMode.KEEP) as pause:
                loading = time.perf_counter()
                await pause.update_weights(directory.resolve())
                loaded = time.perf_counter()
            say(
                f"step {step}: reward {batch.statistics.reward_mean or 0.0:.3f}, lag up to {lag}, "
                f"outside the clip {outside:.1%}; "
                f"waited {began - waited:.1f} s, trained {trained - began:.1f} s, "
                f"pause {pause.quiet_seconds:.3f} s, update {loaded - loading:.3f} s, "
                f"resume {time.perf_counter() - loaded:.3f} s"
            )


def say(text: str) -> None:
    """Says a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the options, and trains."""
    parser = argparse.ArgumentParser(description="GRPO with a live vLLM")
    parser.add_argument("--url", required=True, help="the server's root")
    parser.add_argument("--model", type=Path, required=True, help="the directory it serves")
    parser.add_argument("--out", type=Path, default=Path("grpo-weights"), help="for new weights")
    parser.add_argument("--device", default="cpu", help="of the trainer")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--groups", type=int, default=4, help="in a batch")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    options = parser.parse_args(arguments)
    anyio.run(train, options, backend=options.backend)


if __name__ == "__main__":
    main()
