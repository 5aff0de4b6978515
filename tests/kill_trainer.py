"""The trainer that is killed: an engine with tool loops and a judger, checkpoints between batches, and a log.

    python -m tests.kill_trainer DIRECTORY BACKEND PROMPTS KIND AFTER

It kills itself, as if from outside, when it has come by KIND so often. What it had written and not brought to the disk
by then is in the system's hands, as it is when anybody kills a process. If KIND is "outside", its parent kills it: it
writes a byte whenever it comes by anywhere.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
from anyio.lowlevel import checkpoint

from rollnest import AsyncStrategy, Engine, Prompt, Rollout, Sample, Sampling, TaskSpec, tool_key
from rollnest.abc import Attempt
from rollnest.errors import EndOfPrompts
from rollnest.testing import ScriptedController, expected_token

__all__ = ["OUTSIDE", "expected_ids", "main"]

OUTSIDE = "outside"
GROUP = 2
TURNS = 3
MAX_TOKENS = 6
BATCH = 4
VOCABULARY = 1000
STOP_EVERY = 16


class Killer:
    """Kills this process when something has happened so often."""

    def __init__(self, kind: str, after: int) -> None:
        self._kind = kind
        self._left = after

    def at(self, kind: str) -> None:
        """Says that this happens now."""
        if self._kind == OUTSIDE:
            os.write(1, b".")
        if kind == self._kind:
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Log:
    """Lines that are on the disk before anything else is done."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, **line: Any) -> None:
        """Writes one."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def expected_ids(uid: str, visit: int) -> list[list[int]]:
    """The tokens of a visit's samples in a run that nobody interrupts."""
    return [_expected(int(uid[1:]), visit, index) for index in range(GROUP)]


def _expected(number: int, visit: int, index: int) -> list[int]:
    prompt, response = [1 + number, 2], list[int]()
    for turn in range(TURNS):
        for _ in range(MAX_TOKENS):
            response.append(
                expected_token(
                    [*prompt, *response],
                    vocab_size=VOCABULARY,
                    stop_id=0,
                    stop_every=STOP_EVERY,
                    salt=f"task/p{number}/{visit}/{index}",
                )
            )
            if response[-1] == 0:
                break
        if turn < TURNS - 1:
            response.append(500 + 10 * turn + index)
    return response


def task_of(number_of_prompts: int, killer: Killer, directory: Path) -> TaskSpec:
    """Loops with three turns and two tools; a judger that takes its time."""

    async def look_up(turn: int, index: int) -> int:
        await checkpoint()
        killer.at("tool")
        with (directory / "tools").open("a", encoding="utf-8") as file:
            file.write(f"{tool_key()}\n")
        await checkpoint()
        return 500 + 10 * turn + index

    async def loop(rollout: Rollout) -> None:
        for turn in range(TURNS):
            await rollout.generate()
            if turn < TURNS - 1:
                rollout.append([await rollout.tool(look_up, turn, rollout.index)])

    async def judge(sample: Sample) -> float:
        await checkpoint()
        killer.at("judge")
        await checkpoint()
        return float(len(sample.segments[0]) % 2)

    prompts = [Prompt(f"p{n}", token_ids=[1 + n, 2]) for n in range(number_of_prompts)]
    return TaskSpec(
        "task",
        prompts,
        judger=judge,
        loop=loop,
        group_size=GROUP,
        epochs=1,
        sampling=Sampling(MAX_TOKENS),
        strategy=AsyncStrategy(max_staleness=10**6, lead=1),
    )


class Dying(ScriptedController):
    """A server whose client may be killed while an answer comes."""

    def __init__(self, killer: Killer) -> None:
        super().__init__(rate=2000.0, stream=True, vocab_size=VOCABULARY, stop_every=STOP_EVERY)
        self._killer = killer

    async def generate(self, attempt: Attempt) -> None:
        """Answers."""
        real = attempt.commit

        def commit(*columns: Any) -> int:
            kept: int = real(*columns)
            self._killer.at("turn")
            return kept

        await super().generate(cast("Attempt", _Watched(attempt, commit)))


class _Watched:
    """An attempt that tells of each token."""

    def __init__(self, attempt: Attempt, commit: Callable[..., int]) -> None:
        self._attempt = attempt
        self.commit = commit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attempt, name)


def arm(killer: Killer) -> None:
    """Has the writing of checkpoints tell where it is."""
    rename, fsync = Path.rename, os.fsync

    def renaming(path: Path, target: Any) -> Path:
        if path.name.startswith(".writing-"):
            killer.at("rename")
        return rename(path, target)

    def bringing(fd: Any) -> None:
        if "/.writing-" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            killer.at("write")
        fsync(fd)

    Path.rename = renaming  # type: ignore[method-assign, assignment]
    os.fsync = bringing


async def train(directory: Path, number_of_prompts: int, killer: Killer) -> None:
    """Trains: a line, a commit and a checkpoint for each batch."""
    log = Log(directory / "log")
    task = task_of(number_of_prompts, killer, directory)
    engine = Engine.restore(
        directory / "engine", Dying(killer), task, missing="fresh", batch_size=BATCH
    )
    if engine.restored is not None:
        log.write(what="restored", batches=engine.restored.batches, again=engine.restored.again)
    async with engine:
        if engine.restored is None:
            await engine.save(directory / "engine")
        while True:
            try:
                batch = await engine.next_batch()
            except EndOfPrompts:
                break
            log.write(
                what="batch",
                index=batch.index,
                again=batch.again,
                visits={group.prompt.uid: group.visit for group in batch.groups},
                ids={g.prompt.uid: [_ids(s) for s in g.samples] for g in batch.groups},
            )
            if not batch.index % 3:
                await engine.save(directory / "engine")  # it is in this checkpoint
            killer.at("taken")
            engine.commit(batch)
            killer.at("trained")
            if batch.index % 2:
                await engine.save(directory / "engine")
        figures = engine.statistics()
    log.write(what="end", drawn=figures.total("drawn"), delivered=figures.total("delivered"))


def _ids(sample: Sample) -> list[int]:
    return sample.segments[0].ids.tolist()


def main(arguments: Iterable[str]) -> None:
    """Runs it."""
    directory, backend, prompts, kind, after = arguments
    killer = Killer(kind, int(after))
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    arm(killer)
    logging.disable(logging.WARNING)  # of an event loop that a busy machine holds up
    anyio.run(partial(train, path, int(prompts), killer), backend=backend)


if __name__ == "__main__":
    main(sys.argv[1:])
