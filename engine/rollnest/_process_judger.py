"""A judger that is to run in processes of its own, because it may have to be killed."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from inspect import iscoroutinefunction
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from attrs import field, frozen

from ._checks import whole
from .abc import BatchJudger, CompositeJudger, Judger, JudgerLike
from .errors import describe

__all__ = ["ProcessJudger", "main_file", "pack"]


@frozen(eq=False)
class ProcessJudger:
    """Runs a synchronous judger in worker processes, which can be killed, where a thread can only be abandoned.

        TaskSpec("code", prompts, judger=ProcessJudger(run_the_tests, workers=8), limits=Limits(judge=10.0))

    For judgers that may never return, that may crash, or that keep the interpreter to themselves. One that takes too
    long, or whose group is cancelled, is killed with every process it has started; the next call gets a new process.
    One that crashes fails its sample, with the signal or the exit code as the reason.

    The judger is pickled once, here, and sent to each process when it starts: what it loads there stays, so it may load
    a model at its first call. Samples and answers are pickled too. Processes start when they are needed, afresh, with
    nothing of this process but `sys.path` and the environment. A judger that is defined in the main script is found by
    running that script there under another name, so the script's own run must stand under
    `if __name__ == "__main__":`.

    Calling it runs the judger in this process; the engine never does.

    Attributes:
        judger: A synchronous function of a sample, or an object with `judge` or `batch_judge`; no composite: wrap its
            parts instead.
        workers: How many processes at most; `None` is one for each CPU. Each call holds a judge slot, too.

    Raises:
        TypeError: The judger is asynchronous or a composite, or it can't be pickled.
    """

    judger: JudgerLike
    workers: int | None = field(default=None, kw_only=True, validator=whole(1, optional=True))
    packed: bytes = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        judger = self.judger
        function = self.function
        if function is None or isinstance(judger, ProcessJudger):
            raise TypeError(
                "judger of a ProcessJudger must be a function of a sample, or have judge or batch_judge, "
                f"got {judger!r}"
            )
        if iscoroutinefunction(function) or iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        ):
            raise TypeError(
                f"judger of a ProcessJudger must be synchronous, got {judger!r}; an async one needs no process"
            )
        object.__setattr__(self, "packed", pack("judger of a ProcessJudger", function))

    @property
    def by_group(self) -> bool:
        """Whether it judges whole groups."""
        judger = self.judger
        return isinstance(judger, BatchJudger) and (
            not isinstance(judger, Judger) or bool(getattr(judger, "judges_groups", False))
        )

    @property
    def uses_policy(self) -> bool:
        """Whether it asks the policy."""
        return bool(getattr(self.judger, "uses_policy", False))

    @property
    def function(self) -> Callable[[Any], Any] | None:
        """What is called; `None` if there is nothing."""
        judger = self.judger
        if self.by_group:
            return cast("BatchJudger", judger).batch_judge
        if isinstance(judger, Judger):
            return judger.judge
        if isinstance(judger, CompositeJudger):
            return None
        return judger if callable(judger) else None

    @property
    def at_most(self) -> int:
        """How many processes at most."""
        if self.workers is not None:
            return self.workers
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def __call__(self, given: Any, /) -> Any:
        """Asks the judger in this process."""
        function = self.function
        assert function is not None
        return function(given)


def pack(what: str, value: object) -> bytes:
    """Pickles something that is to be unpickled in a worker.

    Raises:
        TypeError: It can't be pickled, or nobody else could unpickle it.
    """
    file = BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except Exception as error:
        raise TypeError(
            f"{what} must be picklable, to be sent to a process: {describe(error)}, got {value!r}"
        ) from error
    if pickler.from_main and main_file() is None:
        raise TypeError(
            f"{what} is defined in an interactive session, where no process can find it; put it into a module: "
            f"{value!r}"
        )
    return file.getvalue()


def main_file() -> str | None:
    """The file of the main module; `None` in an interactive session."""
    path: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    return path if path is not None and Path(path).is_file() else None


class _Pickler(pickle.Pickler):
    """Notices what comes from the main module."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.from_main = False

    def reducer_override(self, obj: Any, /) -> Any:
        if getattr(obj, "__module__", None) == "__main__":
            self.from_main = True
        return NotImplemented
