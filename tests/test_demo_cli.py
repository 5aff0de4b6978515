"""The command line: its errors are one line and exit 2, its help needs no torch, and the demo runs end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollnest_adapters import cli
from rollnest_adapters.cli import main

LIGHT = """
import sys
from rollnest_adapters.cli import main
try:
    main(["demo", "--help"])
except SystemExit as end:
    assert end.code == 0
loaded = {"torch", "transformers", "rich", "reasoning_gym", "numpy", "anyio"} & set(sys.modules)
assert not loaded, loaded
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--unknown"], "unrecognized arguments: --unknown"),
        (["demo", "--step", "3"], "unrecognized arguments: --step 3"),
        (["demo", "--steps", "0"], "--steps: must be >= 1, got 0"),
        (["demo", "--steps", "x"], "--steps: must be a whole number, got 'x'"),
        (["demo", "--seed", "-1"], "--seed: must be >= 0, got -1"),
        (["demo", "--lr", "-0.1"], "--lr: must be finite and >= 0, got -0.1"),
        (["demo", "--lr", "nan"], "--lr: must be finite and >= 0, got nan"),
        (["demo", "--lr", "fast"], "--lr: must be a number, got 'fast'"),
        (["demo", "--backend", "curio"], "--backend: invalid choice: 'curio'"),
        (["train"], "invalid choice: 'train'"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_arguments_exit_2_and_say_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert main(["demo", "--model", nowhere, "--out", str(tmp_path / "r.html")]) == 1
    assert capsys.readouterr().err == f"rollnest: --model: no directory {nowhere!r}\n"


def test_a_directory_without_a_model_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["demo", "--model", str(tmp_path), "--out", str(tmp_path / "r.html")]
    assert main(arguments) == 1
    assert "holds no model that can be loaded" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_found_out_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert "Is a directory" in capsys.readouterr().err


def test_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(parsed: object) -> int:
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    monkeypatch.setattr(cli, "_demo", missing)
    assert main(["demo"]) == 1
    assert "gguf is not installed: pip install 'rollnest[smollm2]'" in capsys.readouterr().err


def test_a_module_of_nobody_s_extra_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(parsed: object) -> int:
        raise ModuleNotFoundError("No module named 'rollnest_adapters.x'", name="rollnest_adapters")

    monkeypatch.setattr(cli, "_demo", missing)
    with pytest.raises(ModuleNotFoundError):
        main(["demo"])


def test_help_loads_nothing_heavy() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert "--shuffle-rewards" in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_short_demo_end_to_end(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("rollnest_adapters.demo.run.WARM_STEPS", 20)
    report, figures = tmp_path / "out" / "r.html", tmp_path / "out" / "r.json"
    threads = torch.get_num_threads()
    arguments = ["demo", "--steps", "2", "--backend", backend]
    assert main([*arguments, "--out", str(report), "--json", str(figures)]) == 0
    assert torch.get_num_threads() == threads
    assert "<svg" in report.read_text(encoding="utf-8")
    result = json.loads(figures.read_text(encoding="utf-8"))
    assert result["backend"] == backend
    assert result["steps"] == len(result["rewards"]) == len(result["pause_ms"]) == 2
    assert result["tokens_committed"] > 0
    assert result["tokens_lost"] == 0
    assert sum(result["lag_histogram"].values()) == 2 * 16 * 8
    groups = result["groups"]
    assert groups["drawn"] == sum(
        groups[name] for name in ("delivered", "ready", "waiting", "flight")
    )
    assert "held-out accuracy" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ray
def test_a_demo_whose_loops_run_in_actors_and_lose_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_ray: None
) -> None:
    import ray

    from rollnest_adapters.demo.progress import Display
    from rollnest_adapters.ray import RayLoops

    made: list[RayLoops] = []
    killed: list[object] = []
    enter = RayLoops.__aenter__
    told = Display.step

    async def entered(self: RayLoops) -> RayLoops:
        made.append(self)
        return await enter(self)

    def step(self: Display, *args: Any) -> None:
        if not killed:
            actor: Any = made[0]._links[0].actor
            killed.append(actor)
            ray.kill(actor)
        told(self, *args)

    monkeypatch.setattr(RayLoops, "__aenter__", entered)
    monkeypatch.setattr(Display, "step", step)
    monkeypatch.setattr("rollnest_adapters.demo.run.WARM_STEPS", 20)
    figures = tmp_path / "r.json"
    arguments = ["demo", "--steps", "2", "--ray", "2", "--json", str(figures)]
    assert main([*arguments, "--out", str(tmp_path / "r.html")]) == 0
    assert len(killed) == 1
    result = json.loads(figures.read_text(encoding="utf-8"))
    assert result["steps"] == len(result["rewards"]) == len(result["pause_ms"]) == 2
    assert result["tokens_lost"] == 0
    assert sum(result["lag_histogram"].values()) == 2 * 16 * 8
    groups = result["groups"]
    assert groups["drawn"] == sum(
        groups[name] for name in ("delivered", "ready", "waiting", "flight")
    )
