"""A run of one sample with three turns and three tools, which is saved and killed at a moment that is asked for.

    python -m tests.kill_tools DIRECTORY BACKEND MOMENT ON_UNKNOWN

`MOMENT` is `turn` (the third has a token), `tool` (the second runs), or empty: then it goes on to its end and prints
its ids and turns. Each call of a tool writes a line to a file outside.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import Event, create_task_group, sleep_forever

from rollnest import Engine, Prompt, Rollout, Sampling, TaskSpec
from rollnest.abc import Attempt
from rollnest.errors import EndOfPrompts
from rollnest.testing import ScriptedController

__all__ = ["main"]


class Saying(ScriptedController):
    """Says when the third turn has a token, and keeps what it was asked."""

    def __init__(self, reached: Event, moment: str) -> None:
        super().__init__(rate=1000.0, stream=True, stop_every=10_000)
        self._reached = reached
        self._moment = moment

    async def generate(self, attempt: Attempt) -> None:
        """Answers; in the third turn one token, and then nothing."""
        if self._moment == "turn" and len(self.prompts) == 2:
            self.prompts.append(attempt.prompt_ids.tolist())
            attempt.commit([77], [-1.0])
            self._reached.set()
            await sleep_forever()
        await super().generate(attempt)


async def run(directory: Path, moment: str, on_unknown: Any) -> None:
    """Runs until the moment, or to its end."""
    reached = Event()

    async def look_up(number: int) -> int:
        with (directory / "calls").open("a", encoding="utf-8") as file:
            file.write(f"{number}\n")
        if moment == "tool" and number == 1:
            reached.set()
            await sleep_forever()
        return 500 + number

    async def loop(rollout: Rollout) -> None:
        for number in range(3):
            await rollout.generate()
            rollout.append([await rollout.tool(look_up, number, on_unknown=on_unknown)])

    task = TaskSpec(
        "task",
        [Prompt("p", token_ids=[1, 2])],
        judger=None,
        loop=loop,
        group_size=1,
        epochs=1,
        sampling=Sampling(4),
    )
    controller = Saying(reached, moment)
    engine = Engine.restore(directory / "engine", controller, task, missing="fresh")
    async with engine, create_task_group() as tasks:

        async def save_and_die() -> None:
            await reached.wait()
            await engine.save(directory / "engine")
            os.kill(os.getpid(), signal.SIGKILL)

        tasks.start_soon(save_and_die)
        try:
            (sample,) = (await engine.next_batch(1)).samples
            ids = sample.segments[0].ids.tolist()
            said: dict[str, Any] = {"ids": ids, "turns": [len(turn) for turn in sample.turns]}
        except EndOfPrompts:
            said = {"dropped": dict(engine.statistics().tasks["task"].dropped)}
        sys.stdout.write(json.dumps({**said, "asked": controller.prompts}) + "\n")
        tasks.cancel_scope.cancel()


def main(arguments: Iterable[str]) -> None:
    """Runs it."""
    directory, backend, moment, on_unknown = arguments
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    anyio.run(partial(run, path, moment, on_unknown), backend=backend)


if __name__ == "__main__":
    main(sys.argv[1:])
