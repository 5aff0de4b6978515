"""One request to the policy's server, and the record its answer is committed into.

A controller commits what it receives at once and synchronously; a turn's outcome is what stands here, never
what a cancel scope says. Everything is checked before it is recorded, and everything that is not recorded is
counted: too late (the engine had given the attempt up), or rejected (it broke a rule).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from random import SystemRandom

from attrs import evolve

from ._options import Sampling
from ._response import Response, token_column
from .errors import InferenceError

__all__ = ["Attempt", "FinishReason", "TokenCounters"]


PROBE = "probe"
"""The affinity of requests that belong to no rollout."""

_random_bits = SystemRandom().getrandbits


class FinishReason(StrEnum):
    """Why a server ended its answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


_FINISH_REASONS: dict[str, FinishReason] = {reason.value: reason for reason in FinishReason}


class TokenCounters:
    """Where the tokens of all attempts went; every count only rises.

    Attributes:
        committed: Tokens recorded in attempts.
        late: Tokens that came after the engine had given their attempt up.
        rejected: Tokens of answers that broke a rule, or beyond the cap.
        discarded: Committed tokens that reached no sample: of failed requests, past a stop string, or of
            partials that were not to be kept.
        retries: Requests that were sent again because they failed for a reason that may pass.
        unseen_turns: Attempts that were cut without a reply, so that what the server had made is not known.
        resumed_turns: Turns that went on from a partial.
        restarted_turns: Times that a turn began again because its partial was discarded.
        replayed_turns: Turns that were given again from a journal.
        diverged: Rollouts whose loop asked for something else when it ran again.
        restarted: Rollouts that began anew, because a tool did not do the same again.
    """

    __slots__ = (
        "committed",
        "discarded",
        "diverged",
        "late",
        "rejected",
        "replayed_turns",
        "restarted",
        "restarted_turns",
        "resumed_turns",
        "retries",
        "unseen_turns",
    )

    def __init__(self) -> None:
        self.committed: int = 0
        self.late: int = 0
        self.rejected: int = 0
        self.discarded: int = 0
        self.unseen_turns: int = 0
        self.resumed_turns: int = 0
        self.retries: int = 0
        self.restarted_turns: int = 0
        self.replayed_turns: int = 0
        self.diverged: int = 0
        self.restarted: int = 0

    def counts(self) -> dict[str, int]:
        """All of them, by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def restore(self, counts: Mapping[str, int]) -> None:
        """Goes on from those of a checkpoint."""
        for name in self.__slots__:
            setattr(self, name, counts[name])

    def __repr__(self) -> str:
        return "<TokenCounters " + " ".join(f"{n}={getattr(self, n)}" for n in self.__slots__) + ">"


class Attempt:
    """One request: frozen going in, append-only coming out.

    Attributes:
        prompt_ids: Exactly what the policy is to continue, int32: prompt, then everything after it.
        max_tokens: Most tokens this attempt may bring, >= 1.
        sampling: The turn's sampling; `seed` is resolved, `min_tokens` is what remains. Its own `max_tokens` is
            the turn's whole cap: send the attempt's.
        affinity: The same for all attempts of one rollout, so that a router can keep its prefix cache warm; `"probe"`
            for a request that only asks whether the server answers.
        version: Weight version when the attempt started; what is committed without a version gets this one.
        finish_reason: Set by `finish`; `None` while the server is at it.
        detail: What the server said about the end, if anything.
    """

    __slots__ = (
        "_closed",
        "_counters",
        "_id",
        "_newest_version",
        "_received",
        "_vocab_size",
        "affinity",
        "detail",
        "finish_reason",
        "max_tokens",
        "prompt_ids",
        "sampling",
        "version",
    )

    def __init__(
        self,
        prompt_ids: Iterable[int] | memoryview[int],
        *,
        max_tokens: int,
        sampling: Sampling,
        affinity: str = "",
        version: int = 0,
        vocab_size: int | None = None,
        counters: TokenCounters | None = None,
        newest_version: Callable[[], int] | None = None,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
        self._id: str | None = None  # made when it is asked for: drawing it is not free
        # A view is packed and checked already: a long prompt is not looked through again for every turn.
        self.prompt_ids: memoryview[int] = (
            prompt_ids
            if isinstance(prompt_ids, memoryview)
            else memoryview(token_column(prompt_ids)).toreadonly()
        )
        self.max_tokens: int = max_tokens
        self.sampling: Sampling = sampling
        self.affinity: str = affinity
        self.version: int = version
        self._received: Response | None = None  # made when it is needed: most attempts commit once
        self.finish_reason: FinishReason | None = None
        self.detail: str | None = None
        self._vocab_size = vocab_size
        self._counters = counters if counters is not None else TokenCounters()
        self._newest_version = newest_version
        self._closed = False

    def __repr__(self) -> str:
        state = self.finish_reason.value if self.finish_reason else "open"
        return (
            f"<Attempt {self.id[:8]} v{self.version}: {len(self.prompt_ids)} prompt tokens, "
            f"{len(self.received)} of {self.max_tokens} received, {'given up' if self._closed else state}>"
        )

    @property
    def id(self) -> str:
        """32 hex digits, new for every attempt."""
        if self._id is None:
            self._id = f"{_random_bits(128):032x}"
        return self._id

    @property
    def received(self) -> Response:
        """What was committed so far."""
        if self._received is None:
            self._received = Response()
        return self._received

    @property
    def closed(self) -> bool:
        """Whether the engine has given the attempt up; nothing is recorded any more."""
        return self._closed

    def commit(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        versions: int | Sequence[int] | None = None,
    ) -> int:
        """Records tokens that arrived, all or none; synchronous, so nothing can come between.

        Args:
            ids: New token ids only, in order (a delta), in `range(vocab_size)`.
            logprobs: One logprob for each.
            versions: Weight version of all, or of each; `None` is the attempt's.

        Returns:
            How many were recorded: fewer than given beyond the cap, none if the attempt was given up.

        Raises:
            InferenceError: The tokens break a rule. None is recorded; they are counted as rejected.
        """
        count = 0
        try:
            count = len(ids)
            if self._closed:
                self._counters.late += count
                return 0
            if self.finish_reason is not None:
                raise ValueError(f"tokens after the finish reason {self.finish_reason.value!r}")
            if versions is None:
                versions = self.version
                if self._newest_version is not None and self._newest_version() != versions:
                    raise ValueError(
                        f"tokens without a version, but the weights have changed since version {versions}"
                    )
            checked = Response.sampled(ids, logprobs, versions)
            column = checked.packed_ids
            if self._vocab_size is not None and column and max(column) >= self._vocab_size:
                at = next(i for i, v in enumerate(column) if v >= self._vocab_size)
                raise ValueError(
                    f"ids[{at}] = {column[at]} is outside the vocabulary of {self._vocab_size}"
                )
            if versions != self.version:
                self._check_versions(checked)
            # Everything is checked, also what lies beyond the cap; only now it is cut.
            received = self._received
            kept = min(count, self.max_tokens - (0 if received is None else len(received)))
            if received is None and kept == count:
                self._received = checked
            else:
                self.received.extend(checked if kept == count else checked[:kept])
        except (ValueError, TypeError) as error:
            self._counters.rejected += count
            raise InferenceError(f"the server's answer is unusable: {error}") from error
        self._counters.committed += kept
        self._counters.rejected += count - kept
        return kept

    def _check_versions(self, checked: Response) -> None:
        oldest, newest = checked.oldest_version, checked.newest_version
        if oldest is None or newest is None:
            return
        if oldest < self.version:
            raise ValueError(f"tokens of version {oldest}, but the policy has had {self.version}")
        known = None if self._newest_version is None else self._newest_version()
        if known is not None and newest > known:
            raise ValueError(f"tokens of version {newest}, but the newest is {known}")

    def check_echo(self, prompt_ids: Sequence[int]) -> None:
        """Compares the prompt that a server says it continued with the one that was sent.

        Raises:
            InferenceError: They differ.
        """
        if list(prompt_ids) != self.prompt_ids.tolist():
            raise InferenceError(
                "the server's answer is unusable: it echoed another prompt "
                f"({len(prompt_ids)} ids, {len(self.prompt_ids)} were sent)"
            )

    def finish(self, reason: FinishReason | str, detail: str | None = None) -> None:
        """Records why the server ended. An abort is an ordinary end: what was committed stays.

        Raises:
            InferenceError: The reason is unknown, or the attempt was finished before.
        """
        if self._closed:
            return
        try:
            known = _FINISH_REASONS.get(reason) or FinishReason(reason)
        except ValueError:
            raise InferenceError(
                f"the server's answer is unusable: unknown finish reason {reason!r}"
            ) from None
        if self.finish_reason is not None:
            raise InferenceError(
                f"the server's answer is unusable: finished twice, {self.finish_reason.value!r} "
                f"and {known.value!r}"
            )
        self.finish_reason = known
        self.detail = detail

    def probe(self, version: int, counters: TokenCounters) -> Attempt:
        """A request for one token after the same ids, to see whether the server answers; counted apart."""
        return Attempt(
            self.prompt_ids,
            max_tokens=1,
            sampling=evolve(self.sampling, min_tokens=0),
            affinity=PROBE,
            version=version,
            vocab_size=self._vocab_size,
            counters=counters,
            newest_version=self._newest_version,
        )

    def close(self) -> None:
        """Gives the attempt up: whatever still comes is counted as late and not recorded."""
        self._closed = True
