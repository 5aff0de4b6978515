"""Plays the state machine until it finds something: `python -m tests.mutants.hunt BACKEND EXAMPLES STEPS`.

Runs in a process of its own, whose `rollnest` may be a mutant. Prints the number of the run that found it, and what;
nothing is shrunk.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from random import Random

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.machine import Setting, Step, play, runs


def main(backend: str, examples: int, steps: int) -> None:
    """Hunts; the exit status is 1 if something was found."""
    played = 0

    @seed(1)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(runs(steps), st.random_module())
    def history(run: tuple[Setting, list[Step]], schedule: Random) -> None:
        nonlocal played
        played += 1
        try:
            play(backend, *run, Counter())
        except Exception as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())
            sys.stdout.write(f"{played} {what[:200]}\n")
            sys.stdout.flush()
            os._exit(1)  # at once: nothing is shrunk, and a mutant may leave threads behind

    history()
    sys.stdout.write(f"{played} nothing\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
