"""What a model gives tokens that somebody else has sampled: a forward pass of transformers, over exactly their ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

__all__ = ["MEAN_TOLERANCE", "Scorer"]

MEAN_TOLERANCE = 0.12
"""Mean distance of logprobs between two ways of computing the same bfloat16 weights; see `docs/topics/servers.md`."""


class Scorer:
    """One version of the weights."""

    def __init__(self, directory: Path) -> None:
        auto = cast("Any", AutoModelForCausalLM)
        self._model: Any = auto.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(self, ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Returns the logprob of each id but the first, given all before it."""
        with torch.inference_mode():
            logits: Any = self._model(torch.tensor([list(ids)])).logits[0, :-1]
            spread = torch.log_softmax(logits / temperature, dim=-1)
            picked: Any = spread.gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0]
        scored: list[float] = picked.tolist()
        return scored
