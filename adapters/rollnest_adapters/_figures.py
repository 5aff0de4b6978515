"""Measured figures: rows with a median, a baseline and a verdict; one JSON shape, and a table to read.

Of `rollnest bench`, and of the project's own benches.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

__all__ = ["Row", "machine", "quartiles", "result", "row", "summary", "table", "verdict"]


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
    bounds = [bound for bound in (at_most_ratio, at_most, at_least) if bound is not None]
    if len(bounds) > 1:
        raise ValueError(f"{case}: a row has one goal, got {len(bounds)}")
    goal: str | None = None
    holds: bool | None = None
    if at_most_ratio is not None:
        if ratio is None:
            raise ValueError(f"{case}: a goal on a ratio needs a baseline above 0, got {base}")
        goal, holds = f"<= {at_most_ratio:g} x baseline", ratio <= at_most_ratio
    elif at_most is not None:
        goal, holds = f"<= {at_most:g} {unit}", value <= at_most
    elif at_least is not None:
        goal, holds = f">= {at_least:g} {unit}", value >= at_least
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


def result(bench: str, commit: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The one JSON shape: what ran, where, of which commit, and its rows with all raw samples."""
    return {
        "bench": bench,
        "machine": machine(),
        "commit": commit,
        "rows": [asdict(each) for each in rows],
    }


def table(bench: str, commit: str, rows: Sequence[Row]) -> Iterator[str]:
    """The lines of a table: median, middle half and number of the samples, baseline, verdict."""
    yield f"{bench}: {machine()}, commit {commit}"
    width = max(len(each.case) for each in rows)
    for each in rows:
        low, high = quartiles(each.samples)
        spread = f"({low:.4g} - {high:.4g}, n={len(each.samples)})"
        ratio = "" if each.ratio is None else f"{each.ratio:6.2f} x {each.baseline:.4g}"
        line = f"  {each.case:{width}} {each.value:9.4g} {each.unit:10} {spread:28} {ratio:18} {verdict(each)}"
        yield line.rstrip()


def verdict(each: Row) -> str:
    """The goal and whether it holds; empty without one."""
    return "" if each.holds is None else f"{each.goal}: {'holds' if each.holds else 'MISSED'}"


def summary(rows: Sequence[Row]) -> str:
    """How many goals hold, and which do not."""
    judged = [each for each in rows if each.holds is not None]
    missed = [each.case for each in judged if not each.holds]
    names = f"; missed: {'; '.join(missed)}" if missed else ""
    return f"{len(judged) - len(missed)} of {len(judged)} goals hold{names}"


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
