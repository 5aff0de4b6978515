"""The live display, and the tables at the end."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .record import Completion, Record, StepRecord, percentile

__all__ = ["Display"]

_RECENT = 10
_BARS = "▁▂▃▄▅▆▇█"


class Display:
    """Shows a run while it goes on; on a terminal as a bar that moves, else as a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._rewards: list[float] = []

    def say(self, text: str) -> None:
        """Prints a line."""
        self.console.print(text, highlight=False)

    @contextmanager
    def bar(self, description: str, total: int) -> Generator[Bar]:
        """Shows a bar while the block runs."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console) as progress:
            yield Bar(progress, description, total)

    def step(self, bar: Bar, record: StepRecord) -> None:
        """Shows what a step measured."""
        self._rewards.append(record.reward)
        recent = self._rewards[-_RECENT:]
        note = (
            f"reward {sum(recent) / len(recent):.2f} {sparkline(self._rewards, 30)}  "
            f"pause {record.pause_ms:.0f} ms, {record.turns_in_flight} turns cut"
        )
        bar.advance(note)
        if not self.console.is_terminal and len(self._rewards) % _RECENT == 0:
            self.say(f"step {len(self._rewards)}: {note}")

    def completions(self, completions: Sequence[Completion]) -> None:
        """Prints answers with their rewards."""
        table = Table("question", "completion", "reward", "lag", title="Completions")
        for one in completions:
            table.add_row(Text(one.question), Text(one.text), f"{one.reward:g}", str(one.lag))
        self.console.print(table)

    def summary(self, record: Record) -> None:
        """Prints what a run brought."""
        self.console.print(_learning(record))
        self.console.print(_running(record))


class Bar:
    """One bar of the live display."""

    def __init__(self, progress: Progress, description: str, total: int) -> None:
        self._progress = progress
        self._id = progress.add_task(description, total=total, note="")

    def advance(self, note: str, steps: int = 1) -> None:
        """Moves it on."""
        self._progress.update(self._id, advance=steps, note=note)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws values in [0, 1] with one character for each of `width` means."""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)] if width else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    return "".join(_BARS[min(len(_BARS) - 1, int(mean * len(_BARS)))] for mean in means)


def _learning(record: Record) -> Table:
    gain = record.accuracy_after - record.accuracy_before
    rewards = [step.reward for step in record.steps]
    table = Table("", "before", "after", "", title="Did it learn?")
    table.add_row(
        "held-out accuracy (greedy)",
        f"{record.accuracy_before:.1%}",
        f"{record.accuracy_after:.1%}",
        f"[bold]{gain * 100:+.1f} points[/bold]",
    )
    first, last = rewards[:_RECENT], rewards[-_RECENT:]
    table.add_row(
        "mean reward per step",
        f"{sum(first) / len(first):.2f}",
        f"{sum(last) / len(last):.2f}",
        sparkline(rewards, 40),
    )
    return table


def _running(record: Record) -> Table:
    figures = record.figures()
    pauses = [step.pause_ms for step in record.steps]
    cut = [step.turns_in_flight for step in record.steps]
    lags = ", ".join(f"{lag}: {count}" for lag, count in record.lag_histogram.items())
    table = Table("what", "value", title="How it ran", show_header=False)
    rows = [
        ("pause, call to quiet", f"p50 {percentile(pauses, 0.5):.1f} ms, p99 {percentile(pauses, 0.99):.1f} ms"),
        ("turns in flight at a pause", f"p50 {percentile(cut, 0.5):.0f}, most {max(cut)}"),
        ("turns resumed with a partial", f"{figures['resumed_turns']:,}"),
        ("samples by lag (versions)", f"{lags}   ({record.lagging_share:.0%} lag)"),
        ("tokens committed / in records", f"{figures['tokens_committed']:,} / {figures['tokens_in_records']:,}"),
        ("tokens lost", f"[bold]{figures['tokens_lost']}[/bold]"),
        ("tokens expired / discarded", f"{figures['tokens_expired']:,} / {figures['tokens_discarded']:,}"),
        ("tokens late / rejected", f"{figures['tokens_late']:,} / {figures['tokens_rejected']:,}"),
        ("turns cut unseen", f"{figures['tokens_unseen']:,}"),
        ("seconds", ", ".join(f"{part} {s:.0f}" for part, s in record.seconds.items())),
    ]  # fmt: skip
    for name, value in rows:
        table.add_row(name, value)
    return table
