"""Greedy accuracy with plain `model.generate`, outside the engine: the same before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollnest import Prompt
from rollnest.abc import Tokenizer

from .task import ChainSumJudger

__all__ = ["greedy_accuracy", "greedy_texts"]

_CHUNK = 256


def greedy_accuracy(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    judger: ChainSumJudger,
    *,
    max_tokens: int,
) -> float:
    """Returns the share of the prompts that the model answers right when it always takes the likeliest token."""
    texts = greedy_texts(model, tokenizer, prompts, max_tokens=max_tokens)
    scores = [judger.score(text, p.label) for text, p in zip(texts, prompts, strict=True)]
    return sum(scores) / len(scores)


def greedy_texts(
    model: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[Prompt], *, max_tokens: int
) -> list[str]:
    """Returns the model's answers. Leaves it in evaluation mode."""
    cast("Any", model).eval()
    rendered = [tokenizer.render(prompt.messages or ()) for prompt in prompts]
    texts: list[str] = []
    for start in range(0, len(rendered), _CHUNK):
        ids, mask = _left_padded(rendered[start : start + _CHUNK])
        answers = cast("Any", model).generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=sorted(tokenizer.stop_token_ids),
            pad_token_id=0,
        )
        for answer in answers[:, ids.shape[1] :].tolist():
            texts.append(tokenizer.decode(_until(answer, tokenizer.stop_token_ids)))
    return texts


def _left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _until(ids: Sequence[int], stops: frozenset[int]) -> Sequence[int]:
    """What comes before the first stop id; what comes after it is padding."""
    return ids[: next((at for at, i in enumerate(ids) if i in stops), len(ids))]
