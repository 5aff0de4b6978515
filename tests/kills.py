"""A trainer in a process of its own that is killed with SIGKILL again and again, and what its log must say.

    python -m tests.kills --kills 50 --backend asyncio

runs one task through so many kills and checks the log. The log is the trainer's own: it writes a line for each batch
and brings it to the disk before it trains, so what it says has happened, whatever the engine believes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import define, field

from tests import kill_trainer as trainer

__all__ = ["KINDS", "Killed", "check", "kill_again_and_again"]

KINDS: Sequence[str] = (
    "turn",
    "tool",
    "judge",
    "rename",
    "write",
    "taken",
    "trained",
    trainer.OUTSIDE,
)
"""Where a trainer is killed: in a turn, a tool or a judger; before a checkpoint gets its name, or while its files are
written; between `next_batch` and `commit`; after that. There it kills itself, but for the last one: its parent kills
it, wherever it is then."""


@define
class Killed:
    """What has happened to a trainer.

    Attributes:
        kills: How often it was killed, by where.
        starts: How often it was started.
        log: What it wrote, start after start.
    """

    kills: Counter[str] = field(factory=Counter[str])
    starts: int = 0
    log: list[dict[str, Any]] = field(factory=list[dict[str, Any]])


def kill_again_and_again(
    directory: Path, backend: str, kinds: Sequence[str], *, seed: int = 0, prompts: int = 60
) -> Killed:
    """Starts a trainer as often as there are kinds, kills each there, and lets a last one run to its end.

    Args:
        directory: For checkpoints and logs.
        backend: The event loop.
        kinds: Where to kill, in this order.
        seed: Of the moments.
        prompts: How many the task has.
    """
    draw = random.Random(seed)
    killed = Killed()
    for kind in [*kinds, ""]:
        # How often the trainer comes by before it is killed there. Later ones get further.
        after = draw.randrange(1, 4 if kind in ("rename", "write", "taken", "trained") else 12)
        if kind == trainer.OUTSIDE:
            after = draw.randrange(1, 800)  # it comes by everywhere
        command = [sys.executable, "-m", "tests.kill_trainer", str(directory), backend]
        status, said = _run([*command, str(prompts), kind, str(after)], kind, after)
        killed.starts += 1
        if status == -signal.SIGKILL:
            killed.kills[kind] += 1
        elif status or said:
            raise AssertionError(f"start {killed.starts} ended with {status}: {said}")
        else:
            break  # it had come to its end before
    killed.log = [json.loads(line) for line in (directory / "log").read_text().splitlines()]
    return killed


def _run(command: Sequence[str], kind: str, after: int) -> tuple[int, str]:
    """Runs a trainer to its end; returns its exit status, and what it said of errors.

    One that is to be killed from outside writes a byte whenever it comes by anywhere, and goes on. So where it is when
    so many have been read is chance.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as child:
        assert child.stdout is not None
        left = after if kind == trainer.OUTSIDE else 0
        while left and (some := os.read(child.stdout.fileno(), left)):
            left -= len(some)
        if kind == trainer.OUTSIDE and not left:
            child.kill()
        _, said = child.communicate()
    return child.returncode, said.decode()


def check(killed: Killed, prompts: int) -> None:
    """Checks the log: nothing is missing, what came twice was announced, and all tokens are those of a whole run.

    Raises:
        AssertionError: Something does not hold.
    """
    expected = {f"p{number}" for number in range(prompts)}
    at: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, line in enumerate(killed.log):
        if line["what"] == "batch":
            for uid in line["visits"]:
                at.setdefault(uid, []).append((number, line))
    assert set(at) == expected, f"missing: {sorted(expected - set(at))}"
    for uid, times in at.items():
        for (before, old), (after, new) in pairwise(times):
            # It came again: the engine was restored in between, from a checkpoint that either says so itself, or was
            # saved before the batch was handed over.
            restored = [one for one in killed.log[before:after] if one["what"] == "restored"]
            assert restored, f"{uid} came twice in one life of the engine"
            announced = new["again"] or any(old["index"] > one["batches"] for one in restored)
            assert announced, f"{uid} of batch {old['index']} came again in {new['index']}"
            assert old["ids"][uid] == new["ids"][uid] or not new["again"], f"{uid} changed"
    for line in killed.log:
        if line["what"] == "batch":
            for uid, ids in line["ids"].items():
                assert ids == trainer.expected_ids(uid, line["visits"][uid]), (
                    f"{uid} has other tokens: {ids}"
                )
    whole = [line for line in killed.log if line["what"] == "end"]
    assert len(whole) == 1, "it did not come to its end"
    for what in ("drawn", "delivered"):
        assert whole[0][what] == prompts, f"{what} {whole[0][what]}, not {prompts}"


def main() -> int:
    """Runs it; 1 if the log does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills", allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=50, help="how often it is killed (50)")
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    options = parser.parse_args()
    kinds = [KINDS[number % len(KINDS)] for number in range(options.kills)]
    random.Random(options.seed).shuffle(kinds)
    prompts = 40 + 4 * options.kills
    with tempfile.TemporaryDirectory() as directory:
        killed = kill_again_and_again(
            Path(directory), options.backend, kinds, seed=options.seed, prompts=prompts
        )
    check(killed, prompts)
    again = sum(line["what"] == "batch" and line["again"] for line in killed.log)
    by_kind = ", ".join(f"{count} {kind}" for kind, count in killed.kills.items())
    sys.stdout.write(
        f"{options.backend}: {killed.kills.total()} kills ({by_kind}), {killed.starts} starts, {prompts} prompts, "
        f"{again} batches came again: the log holds\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
