"""Draws every row that has a goal: how far from it, on a logarithmic axis, with the spread of its samples.

    python -m benches.picture RESULT.json ... OUT.svg

1 is the goal; left of it is better. A row whose goal is a lower bound is turned around. The whisker spans the middle
half of the samples, over the same baseline.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollnest_adapters._figures import quartiles

__all__ = ["against_goal", "draw"]

HOLDS, MISSED = "#2a7f62", "#b3402a"


def against_goal(row: dict[str, Any]) -> tuple[float, float, float] | None:
    """A row's lower quartile, median and upper quartile as shares of its goal: below 1 is better.

    Returns:
        `None` if the row has no goal.
    """
    if row["goal"] is None:
        return None
    sign, bound, unit = row["goal"].split(" ", 2)
    limit = float(bound) * (row["baseline"] if unit.endswith("baseline") else 1.0)
    low, high = quartiles(row["samples"])
    shares = [max(figure / limit, 1e-4) for figure in (low, row["value"], high)]
    if sign == ">=":
        shares = [1 / share for share in reversed(shares)]
    return shares[0], shares[1], shares[2]


def draw(results: Sequence[dict[str, Any]], file: Path) -> None:
    """Writes the picture; the file's suffix says in which format (SVG, PNG, PDF)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    found = [
        (result["bench"], row, shares)
        for result in results
        for row in result["rows"]
        if (shares := against_goal(row)) is not None
    ]
    figure, axes = pyplot.subplots(figsize=(12, 1.6 + 0.3 * max(1, len(found))))
    labels: list[str] = []
    for at, (bench, row, (low, middle, high)) in enumerate(found):
        color = HOLDS if row["holds"] else MISSED
        axes.plot([low, high], [at, at], color=color, linewidth=2.5, alpha=0.45)
        axes.plot([middle], [at], "o" if row["holds"] else "X", color=color, markersize=7)
        labels.append(f"{bench}: {row['case']}")
        ratio = "" if row["ratio"] is None else f" = {row['ratio']:.2f} x {row['baseline']:.3g}"
        text = f"{row['value']:.3g} {row['unit']}{ratio}   (goal {row['goal']})"
        axes.annotate(
            text,
            (1.01, at),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            color=color,
            annotation_clip=False,
        )
    axes.axvline(1.0, color="#444444", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlabel("median over goal: left of the line holds, right of it is missed")
    axes.grid(axis="x", alpha=0.25)
    first = results[0] if results else {"machine": "", "commit": ""}
    held = sum(bool(row["holds"]) for _, row, _ in found)
    axes.set_title(
        f"rollnest {first['commit']}: {held} of {len(found)} goals hold\n{first['machine']}",
        fontsize=9,
        loc="left",
    )
    figure.savefig(file, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    *sources, out = map(Path, sys.argv[1:])
    draw([json.loads(source.read_text(encoding="utf-8")) for source in sources], out)
