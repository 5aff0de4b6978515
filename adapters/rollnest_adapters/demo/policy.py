"""The policy: a small Llama that reads and writes characters, and a short supervised start for it.

The start stops as soon as the policy is right often enough to be worth rewarding, so that runs with different seeds
begin alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rollnest.abc import Tokenizer

from .evaluation import greedy_texts
from .task import ChainSumJudger, Problem, worked_out
from .tokenizer import EOS, PAD, CharTokenizer

__all__ = ["new_policy", "warm_start"]

_WARM_BATCH = 64
_WARM_RATE = 2e-3
_WARM_RAMP = 20
_PROBE_EVERY = 10


def new_policy(*, seed: int) -> LlamaForCausalLM:
    """Builds an untrained policy of 0.5 M parameters. Leaves torch's own generator alone."""
    config = LlamaConfig(
        vocab_size=CharTokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    with cast("Any", torch.random).fork_rng(devices=()):
        cast("Any", torch).manual_seed(seed)
        return LlamaForCausalLM(config)


def warm_start(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    *,
    probe: Sequence[Problem],
    judger: ChainSumJudger,
    target: float,
    max_steps: int,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, accuracy: None,
) -> int:
    """Shows the policy worked-out solutions until it solves a share `target` of the probe.

    Args:
        model: The policy, trained in place.
        tokenizer: Its tokenizer.
        problems: What to show.
        probe: Problems that are not shown, to see how far it is.
        judger: Says what is solved.
        target: Share of the probe, in [0, 1].
        max_steps: Most optimizer steps.
        seed: Of the order of the problems.
        on_step: Hears the number of steps so far and the probe's share, when it is measured.

    Returns:
        The number of steps it took.
    """
    order = random.Random(seed)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=_WARM_RATE)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / _WARM_RAMP))
    for step in range(1, max_steps + 1):
        model.train()
        ids, labels = _demonstrations(tokenizer, order.sample(problems, _WARM_BATCH))
        logits = cast("Any", model)(input_ids=ids).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        cast("Any", loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ramp.step()
        if step % _PROBE_EVERY == 0:
            texts = greedy_texts(model, tokenizer, [p.prompt() for p in probe], max_tokens=24)
            scores = [judger.score(t, p.entry) for t, p in zip(texts, probe, strict=True)]
            accuracy = sum(scores) / len(scores)
            on_step(step, accuracy)
            if accuracy >= target:
                return step
    return max_steps


def _demonstrations(tokenizer: Tokenizer, problems: Sequence[Problem]) -> tuple[Tensor, Tensor]:
    """Returns ids padded on the right, and labels of the solutions only."""
    questions = [tokenizer.encode(p.question) for p in problems]
    solutions = [[*tokenizer.encode(worked_out(p.question)), EOS] for p in problems]
    width = max(len(q) + len(s) for q, s in zip(questions, solutions, strict=True))
    ids = torch.full((len(problems), width), PAD)
    labels = torch.full_like(ids, -100)
    for row, (question, solution) in enumerate(zip(questions, solutions, strict=True)):
        start, stop = len(question), len(question) + len(solution)
        ids[row, :stop] = torch.tensor(question + solution)
        labels[row, start:stop] = ids[row, start:stop]
    return ids, labels
