"""`rollnest demo --checkpoint`: killed and run again, its steps number on, and no visit is trained twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollnest_adapters.cli import main

# A demo with a short start, which writes down what each step trained and kills itself before or after a checkpoint.
CODE = """
import json, os, signal, sys
from pathlib import Path
import rollnest_adapters.demo.run as run
from rollnest_adapters.cli import main

moment, after, log, *arguments = sys.argv[1:]
run.WARM_STEPS = 20
write, of, left = run.write, run.StepRecord.of, [int(after)]

def die(at):
    if at == moment:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

def writing(directory, saved):
    die("before")
    write(directory, saved)
    die("after")

def logged(batch, pause, step):
    with Path(log).open("a") as file:
        visits = [[group.prompt.uid, group.visit] for group in batch.groups]
        file.write(json.dumps([batch.index, visits]) + "\\n")
    return of(batch, pause, step)

run.write = writing
run.StepRecord.of = staticmethod(logged)
sys.exit(main(arguments))
"""


def demo(
    directory: Path, moment: str, after: int, *arguments: str
) -> subprocess.CompletedProcess[str]:
    files = ["--out", str(directory / "r.html"), "--json", str(directory / "r.json")]
    return subprocess.run(
        [
            *(sys.executable, "-c", CODE, moment, str(after), str(directory / "log"), "demo"),
            *("--checkpoint", str(directory / "checkpoint"), *files, *arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.slow
def test_a_demo_that_is_killed_goes_on(tmp_path: Path) -> None:
    steps = ["--steps", "4"]
    for backend, moment, after in (("asyncio", "after", 1), ("trio", "before", 2)):
        killed = demo(tmp_path, moment, after, *steps, "--backend", backend)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = demo(tmp_path, "", 0, *steps)
    assert done.returncode == 0, done.stderr
    assert "goes on after step 2" in done.stdout
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["steps"] == len(result["rewards"]) == len(result["training"]) == 4
    assert result["tokens_lost"] == 0
    assert result["groups"]["delivered"] == 4 * 16
    assert 0 <= result["accuracy_before"] <= 1
    assert "<svg" in (tmp_path / "r.html").read_text()
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [index for index, _ in log] == [
        1,
        2,
        3,
        3,
        4,
    ]  # the third was trained by weights that are gone
    trained = [tuple(visit) for _, visits in dict(log).items() for visit in visits]
    assert len(set(trained)) == len(trained) == 4 * 16
    again = demo(tmp_path, "", 0, *steps)  # there is nothing left to do
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "r.json").read_text())["rewards"] == result["rewards"]
    other = demo(tmp_path, "", 0, "--steps", "5")
    assert other.returncode == 1
    assert "holds a run with steps=4, and this one has 5" in other.stderr


def test_a_damaged_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo.pt").write_bytes(b"x" * 100)
    arguments = ["demo", "--checkpoint", str(tmp_path), "--out", str(tmp_path / "r.html")]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / 'demo.pt'} can't be read" in said
