"""Loops that the tests run in actors: they import the engine, and nothing else."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from rollnest import Rollout

__all__ = ["add", "deadly", "fails_to_load", "hang_once", "stubborn", "talk", "waits_in_a_tool"]


async def talk(rollout: Rollout) -> None:
    """Turns with tools between, and a score of its own."""
    for number in range(3):
        await rollout.generate()
        rollout.append([500 + await rollout.tool(add, number, 1)])
    rollout.finish("enough")


async def add(a: int, b: int) -> int:
    return a + b


async def waits_in_a_tool(rollout: Rollout) -> None:
    """One tool never returns the first time, in any actor; the directory is the prompt's label."""
    await rollout.generate()
    rollout.append([await rollout.tool(hang_once, str(rollout.prompt.label), rollout.index)])
    await rollout.generate()


async def hang_once(directory: str, index: int) -> int:
    began = Path(directory) / f"tool-{index}"
    if began.exists():
        return 700
    began.touch()
    await asyncio.Event().wait()
    return 0


async def stubborn(rollout: Rollout) -> None:
    """Of one prompt it can't be cancelled, the first time."""
    await rollout.generate()
    began = Path(str(rollout.prompt.label)) / "stubborn"
    if rollout.prompt.uid == "p0" and not began.exists():
        began.touch()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue


async def deadly(rollout: Rollout) -> None:
    """Of one prompt it takes its actor down."""
    await rollout.generate()
    if rollout.prompt.uid == "p0":
        os._exit(3)


class FailsToLoad:
    """A loop that can be sent and not be received."""

    def __reduce__(self) -> Any:
        return _refuse, ()

    async def __call__(self, rollout: Rollout) -> None:
        """Never called."""


def _refuse() -> None:
    raise ImportError("no module named sandbox")


fails_to_load = FailsToLoad()
