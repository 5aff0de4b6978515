"""What all benches share: the clock, rows, medians, the JSON shape, a table to read."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from anyio.lowlevel import checkpoint
from attrs import asdict, field, frozen

__all__ = [
    "BACKENDS",
    "Row",
    "calm",
    "main",
    "now",
    "report",
    "result",
    "row",
    "settle",
    "summary",
    "until",
]

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
    """Lets everything else run until a condition holds. Before a measurement, never in one."""
    while not condition():
        await checkpoint()


async def settle() -> None:
    """Lets everything that can run now run to its next wait."""
    for _ in range(20):
        await checkpoint()


@frozen(kw_only=True)
class Row:
    """One measured case.

    Attributes:
        case: What was measured.
        value: Median of the samples.
        unit: Of value, samples and baseline.
        samples: Raw figures, in the order they were taken.
        baseline: Median of the baseline in the same run; `None` without one.
        ratio: Value over baseline.
        goal: What is aimed for, in words.
        holds: Whether it is met; `None` without a goal.
    """

    case: str
    value: float
    unit: str
    samples: Sequence[float] = field(repr=False)
    baseline: float | None = None
    ratio: float | None = None
    goal: str | None = None
    holds: bool | None = None


def row(
    case: str,
    unit: str,
    samples: Sequence[float],
    *,
    baseline: Sequence[float] | None = None,
    at_most_ratio: float | None = None,
    at_least_ratio: float | None = None,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """Makes a row; the goal is a bound on the ratio to the baseline, or on the value. At most one goal.

    Raises:
        ValueError: There are no samples, several goals, or a goal on a ratio without a baseline.
    """
    if not samples or (baseline is not None and not baseline):
        raise ValueError(f"{case}: samples and baseline must not be empty")
    value = statistics.median(samples)
    base = None if baseline is None else statistics.median(baseline)
    ratio = value / base if base else None
    goals = [
        (bound, measured, below, words)
        for bound, measured, below, words in (
            (at_most_ratio, ratio, True, "x baseline"),
            (at_least_ratio, ratio, False, "x baseline"),
            (at_most, value, True, unit),
            (at_least, value, False, unit),
        )
        if bound is not None
    ]
    if len(goals) > 1:
        raise ValueError(f"{case}: a row has one goal, got {len(goals)}")
    goal: str | None = None
    holds: bool | None = None
    for bound, measured, below, words in goals:
        if measured is None:
            raise ValueError(f"{case}: a goal on a ratio needs a baseline above 0, got {base}")
        goal = f"{'<=' if below else '>='} {bound:g} {words}"
        holds = measured <= bound if below else measured >= bound
    return Row(
        case=case,
        value=value,
        unit=unit,
        samples=list(samples),
        baseline=base,
        ratio=ratio,
        goal=goal,
        holds=holds,
    )


def main(
    bench: str, run: Callable[[bool], list[Row]], arguments: Sequence[str] | None = None
) -> None:
    """Runs a bench from the command line: `--json FILE` for the raw figures, `--quick` for a look."""
    parser = argparse.ArgumentParser(prog=f"python -m benches.{bench}", allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures here")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    options = parser.parse_args(arguments)
    rows = run(options.quick)
    report(bench, rows)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result(bench, rows), indent=1) + "\n", encoding="utf-8")


def result(bench: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The one JSON shape of all benches."""
    return {
        "bench": bench,
        "machine": machine(),
        "commit": commit(),
        "rows": [asdict(each) for each in rows],
    }


def report(bench: str, rows: Sequence[Row]) -> None:
    """Writes a table to read: median, quartiles and number of samples, baseline, verdict."""
    write = sys.stdout.write
    write(f"{bench}: {machine()}, commit {commit()}\n")
    for each in rows:
        low, high = quartiles(each.samples)
        spread = f"{low:.4g} - {high:.4g}, n={len(each.samples)}"
        ratio = "" if each.ratio is None else f"{each.ratio:6.2f} x {each.baseline:.4g}"
        write(
            f"  {each.case:62} {each.value:10.4g} {each.unit:12} ({spread}){'':2}{ratio:20} {verdict(each)}\n"
        )
    write(f"  {summary(rows)}\n")


def verdict(each: Row) -> str:
    """The goal and whether it holds; empty without one."""
    return "" if each.holds is None else f"{each.goal}: {'holds' if each.holds else 'MISSED'}"


def summary(rows: Sequence[Row]) -> str:
    """How many goals hold, and which do not."""
    judged = [each for each in rows if each.holds is not None]
    missed = [each.case for each in judged if not each.holds]
    names = f": {'; '.join(missed)}" if missed else ""
    return f"{len(judged) - len(missed)} of {len(judged)} goals hold{names and ', missed' + names}"


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The middle half of the samples."""
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def machine() -> str:
    """What it ran on, in words."""
    loops = ", ".join(f"{name} {_version(name)}" for name in ("anyio", "trio"))
    return (
        f"{os.cpu_count()} x {_processor()}, {platform.system()}, "
        f"{platform.python_implementation()} {platform.python_version()}, {loops}"
    )


def commit() -> str:
    """The commit, with `+changes` if the working tree differs from it."""
    short = _git("rev-parse", "--short", "HEAD")
    if not short:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "../engine", "../benches")
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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
