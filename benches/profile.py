"""Where the time of a sample goes, by module and by function: for a goal that is missed.

    python -m benches.profile                     an instant policy, groups of 8, asyncio
    python -m benches.profile --case pause        512 turns in flight, paused and resumed
    python -m benches.profile --case nest         the nest that `overhead` compares with
    python -m benches.profile --calls             how often functions are called, by cProfile

The main thread is looked at up to a thousand times per second of processor time, and each look counts for the function
that runs, C functions for their caller. So code is not slowed by being watched, unlike under `--calls`, where small
functions look dearer than they are. Figures are shares of what was measured; `overhead` has the time itself.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import anyio

from benches.harness import BACKENDS, now
from benches.instant import InstantController
from benches.nest import Nest
from benches.overhead import BATCH, PROMPTS
from benches.pause_latency import pause
from rollnest import Engine, PauseMode, Sampling, TaskSpec

__all__ = ["Looks", "main"]

ROOT = Path(__file__).parents[1]
INTERVAL = 0.001  # seconds of processor time


class Looks:
    """What ran, look by look.

    Attributes:
        functions: Looks by module and function.
    """

    def __init__(self) -> None:
        self.functions: Counter[tuple[str, str]] = Counter()

    def look(self, frame: FrameType | None) -> None:
        """Counts the function that a frame belongs to."""
        if frame is not None:
            code = frame.f_code
            self.functions[_module(code.co_filename), code.co_qualname] += 1

    @property
    def modules(self) -> Counter[str]:
        """Looks by module."""
        found: Counter[str] = Counter()
        for (module, _), count in self.functions.items():
            found[module] += count
        return found

    def table(self, most: int = 25) -> str:
        """Shares by module, then by function."""
        looks = self.functions.total()
        total = max(1, looks)
        lines = [f"{looks} looks", "", "by module"]
        lines += [f"  {n / total:6.1%}  {name}" for name, n in self.modules.most_common(most)]
        lines += ["", "by function"]
        for (module, name), n in self.functions.most_common(most):
            lines.append(f"  {n / total:6.1%}  {module}: {name}")
        return "\n".join(lines)


@contextmanager
def looking(looks: Looks) -> Generator[None]:
    """Looks at the main thread while its block runs. Only where there are interval timers: not on Windows."""
    before = signal.signal(signal.SIGPROF, lambda _, frame: looks.look(frame))
    signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _module(file: str) -> str:
    path = Path(file)
    if path.is_relative_to(ROOT):
        return path.relative_to(ROOT).as_posix().removeprefix("engine/")
    parts = path.parts
    for marker in ("site-packages", f"python3.{sys.version_info.minor}"):
        if marker in parts:
            return "/".join(parts[parts.index(marker) + 1 :])
    return file


async def samples(group_size: int, count: int) -> None:
    """So many samples of an instant policy, in batches of 1,000."""
    task = TaskSpec("t", PROMPTS, judger=None, group_size=group_size, sampling=Sampling(32))
    async with Engine(InstantController(), task) as engine:
        for _ in range(max(1, count // BATCH)):
            await engine.next_batch(BATCH // group_size)


async def nest(group_size: int, count: int) -> None:
    """As many in the nest written by hand."""
    async with Nest(group_size) as by_hand:
        for _ in range(max(1, count // BATCH)):
            await by_hand.batch(BATCH // group_size)


def main(arguments: list[str] | None = None) -> None:
    """Runs a case and prints the shares."""
    parser = argparse.ArgumentParser(prog="python -m benches.profile", allow_abbrev=False)
    parser.add_argument("--case", choices=("samples", "nest", "pause"), default="samples")
    parser.add_argument("--backend", choices=BACKENDS, default="asyncio")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument(
        "--count", type=int, default=20_000, help="samples; in flight over all pauses"
    )
    parser.add_argument("--calls", action="store_true", help="how often functions are called")
    options = parser.parse_args(arguments)
    cases: dict[str, Callable[[], Awaitable[object]]] = {
        "samples": partial(samples, options.group_size, options.count),
        "nest": partial(nest, options.group_size, options.count),
        "pause": partial(pause, 512, PauseMode.ABORT, max(1, options.count // 512)),
    }
    case = partial(anyio.run, cases[options.case], backend=options.backend)
    started = now()
    if options.calls:
        profile = cProfile.Profile()
        profile.runcall(case)
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(40)
        out = text.getvalue()
    else:
        looks = Looks()
        with looking(looks):
            case()
        out = looks.table()
    each = (now() - started) / options.count * 1e6
    sys.stdout.write(f"{options.case}, {options.backend}: {each:.1f} us each, all told\n{out}\n")


if __name__ == "__main__":
    main()
