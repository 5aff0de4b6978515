"""Processes that are killed with SIGKILL and go on: checked on what they wrote outside of the engine."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollnest import inspect_checkpoint

from .kill_trainer import OUTSIDE, expected_ids
from .kills import KINDS, Killed, check, kill_again_and_again

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@pytest.mark.slow
@BACKENDS
def test_a_trainer_that_is_killed_anywhere_loses_and_doubles_nothing(
    tmp_path: Path, backend: str
) -> None:
    killed = kill_again_and_again(tmp_path, backend, KINDS, prompts=100)
    assert set(killed.kills) == set(KINDS)
    check(killed, 100)


@pytest.mark.slow
@BACKENDS
def test_a_trainer_that_its_parent_kills_again_and_again(tmp_path: Path, backend: str) -> None:
    killed = kill_again_and_again(tmp_path, backend, [OUTSIDE] * 4, seed=5, prompts=100)
    assert killed.kills[OUTSIDE] == 4
    check(killed, 100)


def line(index: int, *uids: str, again: bool = False, **other: Any) -> dict[str, Any]:
    visits = {uid: int(uid[1:]) for uid in uids}
    ids = {uid: expected_ids(uid, visit) for uid, visit in visits.items()}
    return {"what": "batch", "index": index, "again": again, "visits": visits, "ids": ids} | other


RESTORED: dict[str, Any] = {"what": "restored", "batches": 1, "again": []}
END: dict[str, Any] = {"what": "end", "drawn": 2, "delivered": 2}
GOOD: list[dict[str, Any]] = [line(1, "p0"), line(2, "p1"), RESTORED, line(2, "p1"), END]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (GOOD, None),
        ([line(1, "p0"), RESTORED, line(1, "p0", again=True), line(2, "p1"), END], None),
        ([line(1, "p0"), END], r"missing: \['p1'\]"),
        ([line(1, "p0"), line(2, "p1"), line(3, "p1"), END], "twice in one life"),
        (
            [line(1, "p0"), RESTORED, line(2, "p0"), line(3, "p1"), END],
            "of batch 1 came again in 2",
        ),
        ([line(1, "p0"), line(2, "p1")], "did not come to its end"),
        ([line(1, "p0"), line(2, "p1"), END | {"drawn": 3}], "drawn 3, not 2"),
    ],
)
def test_the_check_of_the_log_sees_faults(log: list[dict[str, Any]], said: str | None) -> None:
    killed = Killed(log=copy.deepcopy(log))
    if said is None:
        check(killed, 2)
        return
    with pytest.raises(AssertionError, match=said):
        check(killed, 2)


def test_the_check_of_the_log_sees_other_tokens() -> None:
    log = copy.deepcopy(GOOD)
    log[0]["ids"]["p0"][1][0] += 1
    with pytest.raises(AssertionError, match="p0 has other tokens"):
        check(Killed(log=log), 2)


def start(directory: Path, backend: str, moment: str, on_unknown: str = "rerun") -> Any:
    """Runs it until it is killed, or to its end; returns what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_tools", str(directory), backend, moment, on_unknown],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stderr == ""
    if moment:
        assert done.returncode == -signal.SIGKILL
        return None
    return json.loads(done.stdout)


def calls(directory: Path) -> list[str]:
    return (directory / "calls").read_text().split()


@pytest.mark.slow
@BACKENDS
def test_a_tool_loop_killed_in_its_third_turn_goes_on_with_it(tmp_path: Path, backend: str) -> None:
    start(tmp_path, backend, "turn")
    assert calls(tmp_path) == ["0", "1"]
    said = start(tmp_path, backend, "")
    assert calls(tmp_path) == ["0", "1", "2"]
    assert said["turns"] == [4, 4, 4]
    (asked,) = said[
        "asked"
    ]  # the rest of the third turn, after the same ids and the token that it had
    assert asked == [1, 2, *said["ids"][:11]]
    assert said["ids"][10] == 77
    whole = start(tmp_path / "whole", backend, "")
    assert whole["ids"][:10] == said["ids"][:10]


@pytest.mark.slow
@BACKENDS
def test_a_tool_that_was_killed_follows_on_unknown(tmp_path: Path, backend: str) -> None:
    for on_unknown in ("rerun", "fail"):
        directory = tmp_path / on_unknown
        start(directory, backend, "tool", on_unknown)
        assert calls(directory) == ["0", "1"]
        said = start(directory, backend, "", on_unknown)
        if on_unknown == "rerun":
            assert calls(directory) == ["0", "1", "1", "2"]
            assert said["turns"] == [4, 4, 4]
        else:
            assert calls(directory) == ["0", "1"]
            assert said["dropped"] == {"tool": 1}
            assert said["asked"] == []


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("size", [0, 100, 5_000, 20_000])
def test_a_disk_that_takes_no_more_fails_the_save_and_nothing_else(
    tmp_path: Path, backend: str, size: int
) -> None:
    command = [sys.executable, "-m", "tests.small_disk", str(tmp_path), backend, str(size)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    before, full, after = map(json.loads, done.stdout.splitlines())
    assert before == {"said": "checkpoint-000001", "found": ["checkpoint-000001"]}
    assert re.search(r"checkpoint-000002 was not written: .*File too large", full["said"])
    assert full["found"] == ["checkpoint-000001"]  # nothing is left of the other
    assert after == {
        "said": "checkpoint-000002",
        "found": ["checkpoint-000001", "checkpoint-000002"],
    }
    assert inspect_checkpoint(tmp_path / "checkpoint-000001").batches == 1
    assert inspect_checkpoint(tmp_path / "checkpoint-000002").batches == 3
