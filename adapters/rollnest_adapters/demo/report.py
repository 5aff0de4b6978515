"""The HTML report: one file with inline SVG curves, nothing to load from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from .record import Completion, Record, percentile

__all__ = ["write_report"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 220, 48, 24, 10
_SMOOTH = 10

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>rollnest demo</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 720px; margin: 2em auto; padding: 0 1em; color: #222 }}
h1 {{ font-size: 1.5em }} h2 {{ font-size: 1.1em; margin-top: 2em }}
table {{ border-collapse: collapse }} td, th {{ padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: left }}
code, pre {{ font-size: 13px }} pre {{ background: #f6f6f6; padding: 1em; overflow-x: auto }}
.big {{ font-size: 2em }} svg {{ width: 100%; height: auto }}
svg text {{ font: 11px system-ui, sans-serif; fill: #666 }}
</style></head><body>
<h1>rollnest demo: sums, learned through the engine</h1>
<p class="big">{before:.1%} → {after:.1%} <small>({gain:+.1f} points)</small></p>
<p>Held-out problems solved with greedy decoding, before and after {count} steps of GRPO. {control}</p>
{sections}
<h2>All figures</h2><pre>{figures}</pre>
</body></html>
"""


def write_report(path: Path, record: Record) -> None:
    """Writes the report of a run.

    Raises:
        OSError: The file can't be written.
    """
    path.write_text(render(record), encoding="utf-8")


def render(record: Record) -> str:
    """Returns the report as HTML."""
    rewards = [step.reward for step in record.steps]
    pauses = [step.pause_ms for step in record.steps]
    flight = [float(step.turns_in_flight) for step in record.steps]
    last = [step.completions[0] for step in record.steps[-10:]]
    sections = [
        _section("Mean reward per step", _curve(rewards, top=1.0)),
        _section(
            f"Pause latency in ms (p50 {percentile(pauses, 0.5):.1f}, p99 {percentile(pauses, 0.99):.1f})",
            _curve(pauses),
        ),
        _section("Turns in flight when the pause began", _curve(flight)),
        _section("Samples by lag, in weight versions", _bars(record.lag_histogram)),
        _section("Completions of the last steps", _completions(last)),
    ]
    shuffled = record.options.get("shuffle_rewards")
    return _PAGE.format(
        before=record.accuracy_before,
        after=record.accuracy_after,
        gain=(record.accuracy_after - record.accuracy_before) * 100,
        count=len(record.steps),
        control="Control: rewards were shuffled, so nothing could be learned." if shuffled else "",
        sections="\n".join(sections),
        figures=escape(_figures(record)),
    )


def _figures(record: Record) -> str:
    short = {k: v for k, v in record.figures().items() if not isinstance(v, list)}
    return json.dumps(short, indent=2)


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{body}"


def _completions(completions: Sequence[Completion]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(one.question)}</code></td><td><code>{escape(one.text)}</code></td>"
        f"<td>{one.reward:g}</td><td>{one.lag}</td></tr>"
        for one in completions
    )
    return f"<table><tr><th>question</th><th>completion</th><th>reward</th><th>lag</th></tr>{rows}</table>"


def _curve(values: Sequence[float], top: float | None = None) -> str:
    """Draws values as dots and their running mean as a line."""
    highest = top if top is not None else max([*values, 1e-9]) * 1.05
    points = [_place(i, value, len(values), highest) for i, value in enumerate(values)]
    means = [
        sum(values[max(0, i - _SMOOTH + 1) : i + 1]) / min(i + 1, _SMOOTH)
        for i in range(len(values))
    ]
    line = " ".join(
        f"{x:.1f},{y:.1f}"
        for x, y in (_place(i, mean, len(values), highest) for i, mean in enumerate(means))
    )
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="#9bc"/>' for x, y in points)
    body = f'{dots}<polyline points="{line}" fill="none" stroke="#147" stroke-width="2"/>'
    return _frame(body, highest, f"step {len(values)}")


def _bars(counts: Mapping[int, int]) -> str:
    highest = max([*counts.values(), 1])
    room = (_WIDTH - _LEFT) / max(1, len(counts))
    parts: list[str] = []
    for at, (name, count) in enumerate(counts.items()):
        _, y = _place(0, count, 1, highest * 1.1)
        x, height = _LEFT + room * at, _HEIGHT - _BOTTOM - y
        parts.append(
            f'<rect x="{x + room * 0.2:.1f}" y="{y:.1f}" width="{room * 0.6:.1f}" height="{height:.1f}" fill="#9bc"/>'
            f'<text x="{x + room / 2:.1f}" y="{y + 14:.1f}" text-anchor="middle">lag {name}: {count}</text>'
        )
    return _frame("".join(parts), highest * 1.1, "")


def _place(index: int, value: float, count: int, highest: float) -> tuple[float, float]:
    x = _LEFT + (_WIDTH - _LEFT - 8) * (index / max(1, count - 1))
    y = _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * min(1.0, value / highest)
    return x, y


def _frame(body: str, highest: float, right: str) -> str:
    base = _HEIGHT - _BOTTOM
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f'<line x1="{_LEFT}" y1="{base}" x2="{_WIDTH}" y2="{base}" stroke="#bbb"/>'
        f'<line x1="{_LEFT}" y1="{_TOP}" x2="{_LEFT}" y2="{base}" stroke="#bbb"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 8}" text-anchor="end">{_label(highest)}</text>'
        f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">0</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 8}" text-anchor="end">{escape(right)}</text>{body}</svg>'
    )


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
