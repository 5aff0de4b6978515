"""What all benches share: rows, medians, the JSON shape, a table to read."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

__all__ = ["Row", "main", "row"]


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
) -> Row:
    """Makes a row; the goal is a bound on the ratio to the baseline, or on the value."""
    value = statistics.median(samples)
    base = None if baseline is None else statistics.median(baseline)
    ratio = None if base is None else value / base
    goal: str | None = None
    holds: bool | None = None
    if at_most_ratio is not None and ratio is not None:
        goal, holds = f"<= {at_most_ratio:g} x baseline", ratio <= at_most_ratio
    elif at_most is not None:
        goal, holds = f"<= {at_most:g} {unit}", value <= at_most
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
    parser = argparse.ArgumentParser(prog=f"python -m benches.{bench}")
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
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "commit": _commit(),
        "rows": [asdict(each) for each in rows],
    }


def report(bench: str, rows: Sequence[Row]) -> None:
    """Writes a table to read."""
    write = sys.stdout.write
    write(f"{bench}\n")
    for each in rows:
        spread = f"{min(each.samples):.4g} - {max(each.samples):.4g}"
        ratio = "" if each.ratio is None else f"{each.ratio:6.2f} x {each.baseline:.4g}"
        verdict = (
            "" if each.holds is None else f"{each.goal}: {'holds' if each.holds else 'MISSED'}"
        )
        write(
            f"  {each.case:58} {each.value:10.4g} {each.unit:12} ({spread}) {ratio:20} {verdict}\n"
        )


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip() or "unknown"
