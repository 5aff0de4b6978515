"""The demo's report and display: complete, self-contained, and nothing a policy writes is taken for markup."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from attrs import evolve
from rich.console import Console

from rollnest import EngineStatistics, TaskStatistics
from rollnest_adapters.demo.progress import Display, sparkline
from rollnest_adapters.demo.record import Completion, Record, StepRecord, percentile
from rollnest_adapters.demo.report import render, write_report
from rollnest_adapters.demo.train import Step

TASK = TaskStatistics(
    drawn=10,
    redrawn=0,
    delivered=6,
    ready=2,
    waiting=0,
    flight=2,
    dropped={},
    expired=0,
    members=80,
    members_delivered=48,
    members_parked=16,
    members_live=16,
    members_dropped=0,
    members_shrunk={},
    failures={},
    produced_samples=64,
    tokens_committed=1000,
    tokens_in_records=990,
    tokens_expired=5,
    tokens_discarded=10,
    tokens_late=3,
    tokens_rejected=0,
    resumed_turns=20,
    restarted_turns=0,
    unseen_turns=0,
    replayed_turns=0,
    diverged=0,
    restarted=0,
)
STATISTICS = EngineStatistics(
    version=3,
    batches=3,
    turns_in_flight=0,
    pauses=3,
    pause_seconds=0.5,
    abandoned_threads=0,
    tasks={"t": TASK},
)
HOSTILE = Completion("1 + 1 =", "<script>alert(1)</script>[bold]&", 0.0, 1)


@pytest.fixture
def record() -> Record:
    steps = [
        StepRecord(
            reward=0.1 * i,
            lags={0: 10, 1: 6},
            pause_ms=5.0 + i,
            turns_in_flight=4 * i,
            tokens=100,
            training=Step(1, 100, 0.1, 1.0),
            completions=[HOSTILE],
        )
        for i in range(3)
    ]
    return Record(
        options={"seed": 0, "shuffle_rewards": False},
        accuracy_before=0.3,
        accuracy_after=0.6,
        steps=steps,
        statistics=STATISTICS,
        controller_committed=1000,
        controller_late=3,
        seconds={"start": 1.0, "training": 2.0},
    )


class Tags(HTMLParser):
    """Sees which tags are open, and every attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_whole_page_that_loads_nothing(record: Record) -> None:
    page = render(record)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert {name for name, _ in tags.attributes}.isdisjoint({"src", "href", "xlink:href"})
    assert "http" not in page
    assert "url(" not in page
    assert page.count("<svg") == 4


def test_the_report_shows_accuracy_and_figures(record: Record) -> None:
    page = render(record)
    assert "30.0% → 60.0%" in page
    assert "tokens_lost" in page
    assert "shuffled" not in page
    control = evolve(record, options={"shuffle_rewards": True})
    assert "rewards were shuffled" in render(control)


def test_the_report_is_written(record: Record, tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", record)
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_figures_are_json_with_the_promised_names(record: Record) -> None:
    figures = json.loads(json.dumps(record.figures()))
    assert {
        "accuracy_before", "accuracy_after", "rewards", "pause_ms", "turns_in_flight_at_pause", "resumed_turns",
        "tokens_committed", "tokens_in_records", "tokens_lost", "tokens_late", "tokens_rejected", "tokens_unseen",
        "lag_histogram", "seconds",
    } <= set(figures)  # fmt: skip
    assert figures["lag_histogram"] == {"0": 30, "1": 18}
    assert figures["seconds"] == 3


def test_tokens_lost_are_those_that_only_the_controller_knows(record: Record) -> None:
    assert record.tokens_lost == 0
    assert evolve(record, controller_committed=1007).tokens_lost == 7


def test_the_summary_prints_the_numbers(record: Record) -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=120))
    display.summary(record)
    display.completions([HOSTILE])
    text = out.getvalue()
    for expected in ("30.0%", "60.0%", "+30.0 points", "tokens lost", "p50", "(38% lag)"):
        assert expected in text
    assert "<script>alert(1)</script>[bold]&" in text  # neither swallowed as rich markup


def test_without_a_terminal_every_tenth_step_is_a_line(record: Record) -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=120))
    with display.bar("GRPO", 20) as bar:
        for _ in range(20):
            display.step(bar, record.steps[1])
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 10", "step 20"]


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [([], 5, ""), ([0.0, 1.0], 5, "▁█"), ([0.0] * 10 + [1.0] * 10, 2, "▁█"), ([1.5], 1, "█")],
)
def test_sparkline(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


def test_percentile() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2
    assert percentile([1.0, 2.0], 0.99) == 2
