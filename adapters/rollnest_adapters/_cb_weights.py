"""New weights into a living model, in place: all or nothing as far as that can be had.

Names and shapes are checked before anything is changed, so a bad source leaves the old weights whole. Only a copy that
fails half-way leaves weights that nobody knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from rollnest.errors import WeightsState, WeightUpdateFailed

if TYPE_CHECKING:
    from os import PathLike

    from torch import Tensor


def load(model: torch.nn.Module, source: Mapping[str, Any] | str | PathLike[str]) -> None:
    """Copies new weights into the model's own tensors. Blocks.

    Args:
        model: No forward pass may run meanwhile.
        source: A state dict, or a directory with safetensors files.

    Raises:
        WeightUpdateFailed: Says what the model holds now.
    """
    given = source if isinstance(source, Mapping) else _read(Path(source))
    pairs = _matched(model, given)
    try:
        with torch.no_grad():
            for target, tensor in pairs:
                target.copy_(tensor)
    except Exception as error:
        raise WeightUpdateFailed(
            f"copying new weights failed half-way: {error}", weights=WeightsState.UNKNOWN
        ) from error


def _matched(model: torch.nn.Module, given: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Pairs each of the model's tensors with its new value; changes nothing."""
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    # Tied weights are one tensor under several names; files hold one of them.
    names_of: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names_of.setdefault(id(tensor), []).append(name)
    for name, tensor in given.items():
        if name not in own:
            raise _refused(f"{name!r} is not in the model")
        if not isinstance(tensor, torch.Tensor):
            raise _refused(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        if tensor.shape != own[name].shape:
            raise _refused(
                f"{name!r} has the shape {tuple(tensor.shape)}, the model's is {tuple(own[name].shape)}"
            )
        if tensor.is_meta:
            raise _refused(f"{name!r} is on the meta device: it has no values")
    pairs: list[tuple[Tensor, Tensor]] = []
    for names in names_of.values():
        present = [name for name in names if name in given]
        if not present:
            raise _refused(f"{names[0]!r} is missing")
        first = given[present[0]]
        for other in present[1:]:
            if given[other] is not first and not torch.equal(given[other], first):
                raise _refused(
                    f"{present[0]!r} and {other!r} are one tensor in the model, but differ"
                )
        pairs.append((own[present[0]], first))
    return pairs


def _read(directory: Path) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = sorted(path.name for path in directory.glob("*.safetensors"))
        if not names:
            raise _refused(f"there is no .safetensors file in {str(directory)!r}")
        weights: dict[str, Tensor] = {}
        for name in names:
            weights.update(load_file(directory / name))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _refused(f"{str(directory)!r} can't be read: {error}") from error
    return weights


def _refused(why: str) -> WeightUpdateFailed:
    return WeightUpdateFailed(f"new weights were refused: {why}", weights=WeightsState.OLD)
