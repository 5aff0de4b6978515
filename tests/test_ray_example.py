"""The example of a cluster runs as it stands, on the Ray of the tests."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

pytestmark = [pytest.mark.ray, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "ray_cluster.py"


def test_one_engine_feeds_two_ranks(local_ray: None) -> None:
    context: Any = ray.get_runtime_context()
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env=os.environ | {"RAY_ADDRESS": context.gcs_address},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert first.startswith("rank 0: groups and tokens of each step [(")
    assert second.startswith("rank 1: groups and tokens of each step [(")
    assert last == "weights v3, 24 groups delivered"


def test_shares_are_even_and_nothing_is_left_out() -> None:
    example = runpy.run_path(str(EXAMPLE))

    class Sized:
        def __init__(self, tokens: int) -> None:
            self.samples = [self]
            self.segments = [range(tokens)]

    groups = [Sized(tokens) for tokens in (9, 1, 8, 2, 7, 3)]
    parts = example["shares"](groups, 2)
    assert [sum(len(g.segments[0]) for g in part) for part in parts] == [15, 15]
    assert sorted(id(g) for part in parts for g in part) == sorted(map(id, groups))
