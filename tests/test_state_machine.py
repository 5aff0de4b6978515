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
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from .machine import MODES, RULES, STATES, Setting, Step, play, runs

WANTED = os.environ.get("ROLLNEST_STATE_MACHINE", "")
EXAMPLES, STEPS = (int(n) for n in (WANTED or "120x30").split("x"))
LONG = 2000 * 50  # steps on one backend, after which everything must have happened often
PART = 200  # runs of one test, which has to end within pytest's own timeout
PARTS = -(-EXAMPLES // PART)
ROUNDS = 5  # of a short run, until nothing is missing
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
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_history_keeps_the_invariants(backend: str, part: int) -> None:
    def history(run: tuple[Setting, list[Step]], schedule: Random) -> None:
        play(backend, *run, fired[backend])

    last = part == PARTS - 1
    for number in range(ROUNDS):
        tried = settings(
            max_examples=min(PART, EXAMPLES - part * PART),
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        )(
            given(runs(STEPS), st.random_module())(history)
        )  # the second one is trio's order of tasks
        if not WANTED:
            # Given numbers, not `derandomize`: what those draw depends on the constants of every module that was
            # imported before, and may lack something rare. Then another number is played too.
            tried = seed(number)(tried)
        tried()
        if WANTED or not seldom(fired[backend], last=last):
            break
    missing = seldom(fired[backend], last=last)
    assert not missing, f"too seldom: {missing}"


def seldom(effects: Counter[str], *, last: bool) -> dict[str, int]:
    """What had no effect; after a whole long run, not often, or which pause mode has not met every state of a group."""
    rules, meetings = (1000, 20) if last and EXAMPLES * STEPS >= LONG else (1, 1)
    wanted = [(EFFECTS[rule], rules) for rule in EFFECTS]
    # A group is drawn, and most are judged, for one step only: a short run may miss that.
    brief = () if rules > 1 else ("drawn", "in a tool", "in a judge")
    wanted += [(name, meetings) for name in MEETINGS if not name.endswith(brief)]
    wanted += [(name, 1) for name in ALSO]
    wanted += [(f"the {who}: quits", 1) for who in ("loop", "judger") if rules > 1]
    return {name: count(effects, name) for name, least in wanted if count(effects, name) < least}


EFFECTS = {
    "ticks": "let others run",
    "pass": "let time pass",
    "ask": "ask",
    "wait": "wait for a batch",
    "take": "receive a batch",
    "cancel_ask": "cancel a next_batch: nothing was taken",
    "pause": "begin a pause",
    "pounce": "pounce",
    "break_off": "break a pause off",
    "enter": "enter a pause",
    "end_pause": "end a pause, ",
    "update": "update the weights: ",
    "cycle": "pause, update, go on",
    "evaluate": "begin an evaluation",
    "await_evaluation": "wait for an evaluation",
    "cancel_evaluation": "cancel an evaluation",
    "late": "late tokens",
    "commit": "commit",
    "save": "save",
    "restore": "restore",
    "afterwards": "update outside a pause: refused",
    "calm": "calm down",
    "mood": "change a mood",
}
"""What each rule is counted as when it had an effect; the beginning of it, where there are several."""

MEETINGS = [
    f"{what} met a group: {state}"
    for what in (*[m.name for m in MODES], "SAVE")
    for state in STATES
]

ALSO = [
    "break the engine",
    "evaluate",
    "replay: a turn goes on",
    "replay: a turn is given again",
    "the engine: a probe",
    "the server: down",
    "a batch comes again",
    "leave: restore",
    *(f"update the weights: {k}" for k in ("dict", "callable", "jump", "published", "old", "new")),
]
"""What must have happened at least once, however short the profile is."""


def count(effects: Counter[str], beginning: str) -> int:
    """How often effects happened that begin so."""
    return sum(times for effect, times in effects.items() if effect.startswith(beginning))


def test_every_rule_has_an_effect_to_be_counted_by() -> None:
    assert EFFECTS.keys() == {step.rule for step in RULES}
