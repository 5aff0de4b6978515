"""Judgers that the tests run in worker processes. Little is imported here: every process does it anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollnest import Sample, Verdict

loaded_at = time.monotonic_ns()


def score(sample: Sample) -> float:
    """The length of the response."""
    return float(len(sample.segments[0]))


def who(sample: Sample) -> Verdict:
    """Tells its process, and prints, which must not garble the answer."""
    sys.stdout.write("a judger prints\n")
    os.write(1, b"past Python's own buffers, too\n")
    sys.stdout.write(sys.stdin.read())
    main = threading.current_thread() is threading.main_thread()
    return Verdict(1.0, details={"pid": os.getpid(), "loaded_at": loaded_at, "main thread": main})


class Counting:
    """Keeps what it has loaded."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.calls = 0

    def judge(self, sample: Sample) -> float:
        self.calls += self.step
        return float(self.calls)


class Ranking:
    """Judges whole groups."""

    def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
        return [float(sample.index) for sample in samples]


class Short(Ranking):
    """Forgets an answer."""

    def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
        return [1.0]


class AsksPolicy:
    uses_policy = True

    def judge(self, sample: Sample) -> float:
        return 1.0


class Unloadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return (_refuse, ())

    def judge(self, sample: Sample) -> float:
        return 1.0


def _refuse() -> None:
    raise ImportError("no module named weights")


class PickyError(Exception):
    """Can't be pickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("picky")
        self.lock = threading.Lock()


def misbehave(sample: Sample) -> Any:
    """Does what the prompt's label says."""
    match sample.prompt.label:
        case "exit code":
            os._exit(3)
        case "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            sys.exit(5)
        case "raise":
            raise ZeroDivisionError("by zero")
        case "picky":
            raise PickyError(1, 2)
        case "none":
            return None
        case "unpicklable":
            return {"score": 1.0, "lock": threading.Lock()}
        case "coroutine":
            return coroutine()
        case _:
            return 1.0
    return None


async def coroutine() -> float:
    return 1.0


def block(sample: Sample) -> float:
    """Says its pid, and that of a child, in the file of the label, and never returns; without a label it does."""
    if sample.prompt.label is None:
        return 1.0
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    path = Path(sample.prompt.label)
    path.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    path.with_suffix(".new").rename(path)
    threading.Event().wait()
    return 1.0


def spin(sample: Sample) -> float:
    """Never returns, and never lets go of the interpreter for long."""
    Path(sample.prompt.label).write_text(str(os.getpid()))
    while True:
        pass


def with_signal_timer(sample: Sample) -> float:
    """Bounds itself with a signal, as maths checkers do; only a main thread may."""
    signal.setitimer(signal.ITIMER_REAL, 30.0)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    return 0.5


class WithHooks:
    """Has steps before and after the judging proper."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def preprocess(self, sample: Sample) -> float:
        return 0.5 if sample.policy_tokens else 0.0

    def postprocess(self, score: float) -> float:
        return score * self.factor

    def judge(self, sample: Sample) -> float:
        return self.postprocess(self.preprocess(sample))


class Dying:
    """Answers twice."""

    def __init__(self) -> None:
        self.calls = 0

    def judge(self, sample: Sample) -> Verdict:
        self.calls += 1
        if self.calls == 3:
            os._exit(3)
        return Verdict(1.0, details={"pid": os.getpid()})
