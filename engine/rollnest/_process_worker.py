"""What runs in a worker process: it takes one function, then calls it with whatever comes, one after the other.

The parent talks to it by its standard input and output, in frames: eight bytes of length, then a pickle. Both are moved
out of the way before any code of the user runs, so that a `print` goes to standard error and can't garble an answer.
The function runs in the main thread, where signals work. A second thread reads, so that the end of the parent is seen
while the function runs, too: then nothing of the process is left behind.
"""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from inspect import iscoroutine
from io import BytesIO
from queue import SimpleQueue
from threading import Event, Thread
from types import ModuleType
from typing import Any, BinaryIO, Literal, TypeAlias

from .errors import describe

__all__ = ["LENGTH_BYTES", "MAIN", "Answer", "Order", "framed", "in_worker", "main"]

LENGTH_BYTES = 8

MAIN = "__mp_main__"
"""The name under which the parent's main module is run in a worker, as `multiprocessing` has it."""

Order: TypeAlias = "tuple[bytes, str | None]"
"""The first frame: the pickled function, and the file of the parent's main module."""

Answer: TypeAlias = "tuple[Literal['ready', 'answer', 'raised'], Any, str]"
"""Every frame of a worker: what it is, the value or the error's text, and the error's traceback."""

_working = False


def in_worker() -> bool:
    """Whether this is a worker process."""
    return _working


def framed(payload: bytes) -> bytes:
    """Returns one frame."""
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def main() -> None:
    """Runs until the parent closes the pipe."""
    global _working
    _working = True
    requests, answers = _take_pipes()
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    busy = Event()
    Thread(target=_read, args=(requests, inbox, busy), name="requests", daemon=True).start()
    first = inbox.get()
    if first is None:
        return
    order: Order = pickle.loads(first)
    packed, main_file = order
    function: Callable[[Any], Any] | None = None

    def load() -> None:
        nonlocal function
        function = _loads(packed, main_file)

    def ask(request: bytes) -> Any:
        assert function is not None
        answer: object = function(_loads(request, main_file))
        if iscoroutine(answer):
            answer.close()
            raise TypeError("the judger answered a coroutine; in a process it must be synchronous")
        return answer

    _send(answers, busy, _told("ready", load))
    while function is not None and (request := inbox.get()) is not None:
        _send(answers, busy, _told("answer", partial(ask, request)))


def _told(kind: Literal["ready", "answer"], call: Callable[[], Any]) -> bytes:
    try:
        answer: Answer = (kind, call(), "")
        return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # in a worker, exit() is an error of the judger like any other
        text = "".join(traceback.format_exception(error))
        answer = ("raised", describe(error), text)
        return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)


def _send(answers: BinaryIO, busy: Event, payload: bytes) -> None:
    busy.clear()  # before the answer is out: then the pipe's end is the ordinary one
    try:
        answers.write(framed(payload))
        answers.flush()
    except BrokenPipeError:
        pass  # the parent has gone; the reader sees it too


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Takes the pipes to the parent, and leaves nothing and standard error in their places."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _read(requests: BinaryIO, inbox: SimpleQueue[bytes | None], busy: Event) -> None:
    while True:
        head = requests.read(LENGTH_BYTES)
        payload = requests.read(int.from_bytes(head, "big")) if len(head) == LENGTH_BYTES else b""
        if not payload:
            break
        busy.set()
        inbox.put(payload)
    if busy.is_set():
        _vanish()
    inbox.put(None)


def _vanish() -> None:
    """Ends this process and those it has started: nobody waits for them any more."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _loads(payload: bytes, main_file: str | None) -> Any:
    return _Unpickler(BytesIO(payload), main_file).load()


class _Unpickler(pickle.Unpickler):
    """Runs the parent's main module only if something of it is asked for."""

    def __init__(self, file: BytesIO, main_file: str | None) -> None:
        super().__init__(file)
        self._main_file = main_file

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "__main__" and MAIN not in sys.modules and self._main_file is not None:
            module = ModuleType(MAIN)
            sys.modules[MAIN] = module
            module.__dict__.update(runpy.run_path(self._main_file, run_name=MAIN))
            sys.modules["__main__"] = module
        return super().find_class(module_name, global_name)
