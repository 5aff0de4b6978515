"""Loops that the tests run in actors: they import the engine, and nothing else."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from rollnest import AgentLoop, LiveGroup, Rollout

__all__ = [
    "Auction",
    "add",
    "deadly",
    "fails_to_load",
    "hang_once",
    "stubborn",
    "talk",
    "waits_in_a_tool",
]


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


class Auction(AgentLoop):
    """Members bid in turn, and know all bids; one is dropped, one resampled, the others run side by side."""

    def __init__(self, *, replayable: bool) -> None:
        self.replayable = replayable

    async def generate_sample(self, rollout: Rollout) -> None:
        """A turn, and a tool that notes who runs."""
        await rollout.generate()
        rollout.append([500 + await rollout.tool(add, rollout.index, os.getpid() * 0)])
        await rollout.generate()

    async def generate_group(self, group: LiveGroup) -> None:
        """See the class."""
        bids: list[int] = []
        first, second, third, fourth = group.rollouts
        for rollout in (first, second):
            rollout.append(bids[-3:] or [7])
            bids += (await rollout.generate(max_tokens=2)).ids.tolist()
        group.drop(fourth, "not needed")
        sample = await group.run(third)
        assert sample.reward is not None
        fresh = group.resample(third)
        fresh.append([sum(bids) % 400])
        await group.each(group.run)


class FailsToLoad:
    """A loop that can be sent and not be received."""

    def __reduce__(self) -> Any:
        return _refuse, ()

    async def __call__(self, rollout: Rollout) -> None:
        """Never called."""


def _refuse() -> None:
    raise ImportError("no module named sandbox")


fails_to_load = FailsToLoad()
