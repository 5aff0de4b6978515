"""The policy that is trained, as a judger may ask it.

A judger's requests pass the gate as turns do: they take a turn slot, come to rest in a pause and go on after it, wait
while the server is down, and are sent again as turns are. A judger holds no turn slot while it waits, and a turn never
waits for a judger, so there is no circle in which both could wait. Its tokens are in no record, and counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar, Token
from typing import cast

from attrs import evolve

from ._attempt import TokenCounters
from ._context import RolloutCore, RolloutServices
from ._continuation import check_sampling
from ._options import Limits, Sampling
from ._records import Message, Prompt, Turn
from .abc import InferenceController, Tokenizer
from .errors import JudgeError

__all__ = ["Policy", "current_policy", "enter_policy", "leave_policy", "policy_services"]

_policy: ContextVar[Policy | None] = ContextVar("rollnest_policy", default=None)


class Policy:
    """The policy that is trained, in a judger with `uses_policy = True`; see `current_policy`."""

    def __init__(self, services: RolloutServices, judged: str) -> None:
        self._services = services
        self._judged = judged

    @property
    def controller(self) -> InferenceController:
        """The engine's controller. Ask it here, not itself: only what passes the gate comes to rest in a pause."""
        return self._services.controller

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's."""
        return self._services.tokenizer

    async def generate(
        self, prompt: str | Iterable[int] | Sequence[Message], *, sampling: Sampling
    ) -> Turn:
        """Has the policy answer; waits while it is paused, or its server is down.

        Args:
            prompt: Token ids, chat messages, or the text of one message of the user.
            sampling: How. Greedy decoding is allowed.

        Raises:
            InferenceError: The server failed.
            UnsupportedSampling: The controller can't honour the sampling.
            LoopError: Text without a tokenizer.
            DataError: The prompt leaves no room in the context.

        Cancellation: the request is cancelled; nothing is kept.
        """
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        given = list(prompt)
        if not given:
            raise JudgeError(f"the judger of {self._judged!r} asks the policy nothing: {prompt!r}")
        services, name = self._services, f"{self._judged}/judge"
        core = RolloutCore(services, Prompt(name, token_ids=[0]), name)
        if isinstance(given[0], int):
            ids = cast("list[int]", given)
        else:
            ids = core.tokenizer("a judger that asks the policy with text").render(
                cast("list[Message]", given)
            )
        return await core.open(ids).generate(sampling=sampling)

    def __repr__(self) -> str:
        return f"<Policy v{self._services.gate.version} for the judger of {self._judged!r}>"


def current_policy() -> Policy:
    """Returns the policy that is trained, for the judger that runs now.

    Only for async judgers with `uses_policy = True`.

    Raises:
        JudgeError: No such judger runs here.
    """
    policy = _policy.get()
    if policy is None:
        raise JudgeError("current_policy() outside of a judger that says uses_policy = True")
    return policy


def policy_services(services: RolloutServices, counters: TokenCounters) -> RolloutServices:
    """What judgers ask the policy with; those of any task, for what is the task's is left out."""
    return evolve(
        services,
        task="judger",
        counters=counters,
        partial=True,
        limits=Limits(),
        max_response_tokens=None,
        max_context=services.capabilities.max_context,
        check=check_sampling,
    )


def enter_policy(policy: Policy | None) -> Token[Policy | None]:
    """What runs from now on in this task has this policy."""
    return _policy.set(policy)


def leave_policy(token: Token[Policy | None]) -> None:
    """Takes `enter_policy` back."""
    _policy.reset(token)
