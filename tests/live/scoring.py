"""What a model gives tokens that somebody else has sampled: a forward pass of transformers, over exactly their ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

__all__ = ["MEAN_TOLERANCE", "TOKEN_TOLERANCE", "Scorer"]

MEAN_TOLERANCE = 0.05
"""Mean distance of logprobs at temperature 1 between two ways of computing the same bfloat16 weights."""

TOKEN_TOLERANCE = 0.01
"""Distance of any one token's logprobs where the server computes in float32 as well. In bfloat16 nothing could be said
of one token: forward passes in it and in float32 differ by over 0.5 at one of 10,000, with a long tail behind."""

_END = 2
"""The id that ends an answer. `min_tokens` forbids it, and with it processed logprobs are those of the other ids."""

_TOGETHER = 16


class Scorer:
    """One version of the weights, of answers whose `min_tokens` is their cap."""

    def __init__(self, directory: Path) -> None:
        auto = cast("Any", AutoModelForCausalLM)
        self._model: Any = auto.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(self, ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Returns the logprob of each id but the first, given all before it."""
        return self.many([ids], temperature=temperature)[0]

    def many(self, rows: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """The same of many rows; those of one length go through the model together."""
        scored: dict[int, list[float]] = {}
        by_length: dict[int, list[int]] = {}
        for at, row in enumerate(rows):
            by_length.setdefault(len(row), []).append(at)
        for alike in by_length.values():
            for start in range(0, len(alike), _TOGETHER):
                some = alike[start : start + _TOGETHER]
                ids = torch.tensor([list(rows[at]) for at in some])
                with torch.inference_mode():
                    logits: Any = self._model(ids).logits[:, :-1]
                    logits[:, :, _END] = -torch.inf
                    spread = torch.log_softmax(logits / temperature, dim=-1)
                    picked: Any = spread.gather(2, ids[:, 1:, None])[:, :, 0]
                scored.update(zip(some, picked.tolist(), strict=True))
        return [scored[at] for at in range(len(rows))]
