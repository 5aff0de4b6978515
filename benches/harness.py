"""What all benches share: the clock, waiting before a measurement, the command line. Rows are `rollnest bench`'s."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anyio.lowlevel import checkpoint

from rollnest_adapters._figures import Row as Row
from rollnest_adapters._figures import result, summary, table
from rollnest_adapters._figures import row as row

__all__ = ["BACKENDS", "Row", "calm", "commit", "main", "now", "row", "settle", "until"]

BACKENDS = ("asyncio", "trio")

clock: Callable[[], float] = time.perf_counter
"""The clock of every bench, in seconds. Tests put one in its place that advances by certain amounts."""


def now() -> float:
    """Returns seconds by `clock`."""
    return clock()


def calm() -> None:
    """Collects garbage, so that a measurement does not pay for what came before it."""
    gc.collect()


async def until(condition: Callable[[], bool]) -> None:
    """Lets everything else run until a condition holds. Before a measurement, never in one.

    Raises:
        RuntimeError: It does not hold after 100,000 turns of the event loop; a bench must not hang.
    """
    for _ in range(100_000):
        if condition():
            return
        await checkpoint()
    raise RuntimeError("what the bench waits for does not happen")


async def settle() -> None:
    """Lets everything that can run now run to its next wait."""
    for _ in range(20):
        await checkpoint()


def main(
    bench: str, run: Callable[[bool], list[Row]], arguments: Sequence[str] | None = None
) -> dict[str, Any]:
    """Runs a bench from the command line: `--json FILE` for the raw figures, `--quick` for a look.

    Returns:
        What `--json` writes.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benches.{bench}", allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures here")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    options = parser.parse_args(arguments)
    of = commit()
    rows = run(options.quick)
    sys.stdout.write("\n".join([*table(bench, of, rows), f"  {summary(rows)}", ""]))
    figures = result(bench, of, rows)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def commit() -> str:
    """The commit, with `+changes` if the engine or the benches differ from it."""
    short = _git("rev-parse", "--short", "HEAD")
    if not short:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "../engine", ".")
    return short + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
