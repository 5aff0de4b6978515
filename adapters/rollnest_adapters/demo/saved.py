"""The demo's own checkpoint: policy, optimizer and engine of one moment, in one file.

`engine.state_dict()` goes into the trainer's file like any other state. So both are restored to the same step, and the
groups that a killed run had trained since then are trained again, by the weights that had not seen them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from attrs import asdict, field, frozen
from cattrs import Converter

from rollnest.errors import CheckpointError

from .record import StepRecord

__all__ = ["Saved", "read", "write"]

_FILE = "demo.pt"


@frozen(kw_only=True, eq=False)
class Saved:
    """A run after one of its steps.

    Attributes:
        asked: What was asked for, as far as it must be the same again.
        trainer: The state of model, optimizer and schedule.
        engine: The engine's state.
        version: Weight version of the policy.
        steps: What each step measured.
        accuracy_before: Share of held-out problems solved before training.
        seconds: How long each part had taken.
        committed: Tokens that the controller had committed.
        late: Tokens that came too late.
    """

    asked: Mapping[str, Any]
    trainer: Mapping[str, Any] = field(repr=False)
    engine: Mapping[str, bytearray] = field(repr=False)
    version: int
    steps: Sequence[StepRecord] = field(repr=False)
    accuracy_before: float
    seconds: Mapping[str, float]
    committed: int
    late: int

    def check(self, asked: Mapping[str, Any], directory: Path) -> None:
        """Raises `CheckpointError` unless the same is asked for again."""
        for name, value in asked.items():
            if self.asked.get(name) != value:
                raise CheckpointError(
                    f"{directory} holds a run with {name}={self.asked.get(name)!r}, and this one has {value!r}"
                )


def read(directory: Path) -> Saved | None:
    """Reads the checkpoint in a folder; `None` if there is none.

    Raises:
        CheckpointError: It can't be read.
    """
    path = directory / _FILE
    if not path.exists():
        return None
    try:
        held: Any = cast("Any", torch).load(path, weights_only=True)
        plain = json.loads(held["plain"])
        return Saved(
            trainer=held["trainer"],
            engine=held["engine"],
            steps=Converter().structure(plain.pop("steps"), list[StepRecord]),
            **plain,
        )
    except Exception as error:  # torch has many, and says of none which file it was
        raise CheckpointError(f"{path} can't be read: {error}") from error


def write(directory: Path, saved: Saved) -> None:
    """Writes it in the place of the one before: beside it first, and renamed once it is on the disk."""
    plain = asdict(
        saved, filter=lambda attribute, _: attribute.name not in ("trainer", "engine"), recurse=True
    )
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f".{_FILE}.writing"
    with part.open("wb") as file:
        cast("Any", torch).save(
            {
                "plain": json.dumps(plain),
                "trainer": dict(saved.trainer),
                "engine": dict(saved.engine),
            },
            file,
        )
        file.flush()
        os.fsync(file.fileno())
    part.replace(directory / _FILE)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
