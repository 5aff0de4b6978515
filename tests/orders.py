"""The order in which trio runs tasks that are ready at once: any order, drawn anew in each run of the tests.

Trio itself only runs them forwards or backwards. It shuffles them as soon as Hypothesis is imported, by whichever test:
a fault would show in a run of all tests and never in one of its own file. So it is imported for all of them. What is
drawn depends on the run's seed and the test alone, so that a test can be given the same order again, on its own too.
"""

from __future__ import annotations

import os
import random

import hypothesis as hypothesis
from trio._core import _run  # pyright: ignore[reportPrivateUsage]

__all__ = ["ORDERS", "draw_order", "seed_of_run"]

ORDERS = "ROLLNEST_ORDERS"
"""The environment variable that has the run's seed; workers inherit it."""


def seed_of_run() -> str:
    """Returns this run's seed: the one it was given, or a new one."""
    return os.environ.setdefault(ORDERS, str(random.SystemRandom().randrange(2**32)))


def draw_order(test: str) -> None:
    """Has a test begin with its own order."""
    _run._r.seed(f"{seed_of_run()} {test}")  # pyright: ignore[reportPrivateUsage]
