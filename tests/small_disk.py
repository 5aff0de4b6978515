"""An engine in a process of its own that may write files of so many bytes only, and saves: as on a disk that gets full.

    python -m tests.small_disk DIRECTORY BACKEND BYTES

The system itself refuses what is written beyond that. Prints what came of each save as a line of JSON: without the
bound, with it, and without it again.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import anyio

from rollnest import Engine, Prompt, Sampling, TaskSpec
from rollnest.errors import CheckpointError
from rollnest.testing import ScriptedController, assert_conserved

__all__ = ["main"]


def bound(size: int) -> None:
    """Lets this process write files of so many bytes at most; -1 is any size."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


def tell(said: str, directory: Path) -> None:
    """Prints what came of a save, and what there is now."""
    found = sorted(path.name for path in directory.iterdir())
    sys.stdout.write(json.dumps({"said": said, "found": found}) + "\n")


async def save_three_times(directory: Path, size: int) -> None:
    """Saves without the bound, with it, and without it again, while the engine goes on."""
    prompts = [Prompt(f"p{n}", token_ids=[1 + n, 2]) for n in range(8)]
    task = TaskSpec(
        "task", prompts, judger=None, group_size=4, epochs=1, sampling=Sampling(400), shuffle=False
    )
    controller = ScriptedController(stop_every=10_000)
    async with Engine(controller, task) as engine:
        for limit in (-1, size, -1):
            batch = await engine.next_batch(2)
            bound(limit)
            try:
                said = (await engine.save(directory)).name
            except CheckpointError as error:
                said = str(error)
            finally:
                bound(-1)
            engine.commit(batch)
            tell(said, directory)
        await engine.next_batch(2)
        assert_conserved(engine, committed=controller.committed)


def main(arguments: Iterable[str]) -> None:
    """Runs it."""
    directory, backend, size = arguments
    logging.disable(logging.WARNING)  # of an event loop that a busy machine holds up
    anyio.run(partial(save_three_times, Path(directory), int(size)), backend=backend)


if __name__ == "__main__":
    main(sys.argv[1:])
