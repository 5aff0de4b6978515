"""Calls of several servers side by side, each under a deadline. The children are owned by the call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TypeVar

from anyio import create_task_group, fail_after

from rollnest.errors import InferenceError

from ._pool_roster import said
from ._pool_server import Server

__all__ = ["Failures", "ask_all", "late", "not_done"]

T = TypeVar("T")

Failures = Mapping[Server, Exception]


async def ask_all(
    servers: Iterable[Server],
    call: Callable[[Server], Awaitable[T]],
    *,
    seconds: float,
    locked: bool = True,
) -> tuple[dict[Server, T], dict[Server, Exception]]:
    """Calls servers side by side.

    Args:
        servers: Which.
        call: Calls one of them.
        seconds: What each of them has for it; waiting until its control call before is over is a part of that.
        locked: Whether it is a control call, of which a server gets one at a time.

    Returns:
        What they answered, and how the others failed.

    Cancellation: all calls are cancelled.
    """
    answers: dict[Server, T] = {}
    failures: dict[Server, Exception] = {}

    async def ask(server: Server) -> None:
        try:
            with fail_after(seconds):
                async with server.lock if locked else nullcontext():
                    answers[server] = await call(server)
        except TimeoutError as error:
            failures[server] = error if str(error) else late(seconds)
        except Exception as error:
            failures[server] = error

    asked = list(servers)
    async with create_task_group() as tasks:
        for server in asked:
            tasks.start_soon(ask, server)
    return answers, {server: failures[server] for server in asked if server in failures}


def late(seconds: float) -> TimeoutError:
    """The error of a deadline."""
    return TimeoutError(f"no answer within {seconds:g} s")


def not_done(what: str, failures: Failures) -> InferenceError:
    """The error where servers failed a call."""
    named = "; ".join(f"{server.name}: {said(error)}" for server, error in failures.items())
    return InferenceError(f"not every server did {what}: {named}", retryable=True)
