"""The state machine over a live engine, on both backends: I1 to I11 after every step, under virtual time.

The profile of CI is modest and always the same. `ROLLNEST_STATE_MACHINE=2000x50` plays so many runs of so many steps
on each backend, others every time. A failure is shrunk, which takes a minute; its steps stand in the error's notes.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .machine import Setting, Step, play, runs

WANTED = os.environ.get("ROLLNEST_STATE_MACHINE", "")
EXAMPLES, STEPS = (int(n) for n in (WANTED or "150x30").split("x"))
PART = 200  # runs of one test, which has to end within pytest's own timeout
BACKENDS = ("asyncio", "trio")

fired: dict[str, Counter[str]] = {backend: Counter() for backend in BACKENDS}


@pytest.fixture(scope="module", autouse=True)
def counts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints at the end how often each rule had an effect."""
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    rows = sorted(set().union(*fired.values()))
    width = max(map(len, rows), default=0)
    text = "".join(
        f"{row:<{width}}" + "".join(f"{fired[b][row]:>9}" for b in BACKENDS) + "\n" for row in rows
    )
    with capture.global_and_fixture_disabled():
        sys.stdout.write(f"\n{EXAMPLES} runs of {STEPS} steps; effects on asyncio and trio\n{text}")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(-(-EXAMPLES // PART)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_history_keeps_the_invariants(backend: str, part: int) -> None:
    @settings(
        max_examples=min(PART, EXAMPLES - part * PART),
        deadline=None,
        database=None,
        derandomize=not WANTED,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(runs(STEPS), st.random_module())  # the second one is trio's order of tasks
    def history(run: tuple[Setting, list[Step]], schedule: Random) -> None:
        play(backend, *run, fired[backend])

    history()
    missing = [rule for rule in EFFECTS if not fired[backend][rule]]
    assert not missing, f"never fired: {missing}"


EFFECTS = [
    "ask",
    "begin a pause",
    "break a pause off",
    "break the engine",
    "calm down",
    "cancel a next_batch: nothing was taken",
    "change a mood",
    "commit",
    "enter a pause",
    "late tokens",
    "let others run",
    "let time pass",
    "pause, update, go on",
    "receive a batch",
    "wait for a batch",
    *(f"update the weights: {k}" for k in ("dict", "callable", "jump", "published", "old", "new")),
    *(
        f"ABORT met a group: {k}"
        for k in ("drawn", "in a turn", "in a tool", "in a judge", "ready")
    ),
]
"""What must have happened at least once, however short the profile is."""
