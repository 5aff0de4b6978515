"""The policy inside a fault server: it makes tokens one by one, stands still, is aborted, and changes its weights.

It knows no HTTP and no server's dialect. Which token comes next is `expected_token` of everything before it, so a
client that sends wrong ids, or a server that goes on from what older weights have cached, is found out.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

from anyio import Event
from anyio.lowlevel import checkpoint

from ._scripted import Stall, expected_logprob, expected_token

__all__ = ["Decoding", "FakePolicy"]


class Decoding:
    """One request, and what the policy has made for it.

    Attributes:
        id: What the server calls it.
        prompt: What it continues.
        ids: Tokens so far.
        logprobs: One for each.
        spans: Label, start and end of each stretch made by one version.
        finish: `"stop"`, `"length"` or `"abort"`; `None` while it goes on.
        waiting: Whether the policy has not begun with it.
        standing: Whether it stands still.
        deaf: How many aborts it does not hear; -1 is all.
        slow: Whether an abort ends it one token later.
    """

    def __init__(
        self,
        id_: str,
        prompt: Iterable[int],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_ids: Iterable[int] = (),
        cache: str = "",
    ) -> None:
        self.id: str = id_
        self.prompt: list[int] = list(prompt)
        self.max_tokens: int = max_tokens
        self.min_tokens: int = min_tokens
        self.stop_ids: frozenset[int] = frozenset(stop_ids)
        self.cache: str = cache
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[tuple[str, int, int]] = []
        self.finish: str | None = None
        self.waiting: bool = True
        self.deaf: int = 0
        self.slow: bool = False
        self.changed: Event = Event()  # a token came, or the end
        self.woken: Event = Event()  # look again
        self.aborted = False
        self.standing: bool = False
        self.computed_by: int | None = None  # weights of its keys and values

    def wake(self) -> None:
        """Has it look at its state again."""
        self.woken.set()
        self.woken = Event()

    def tell(self) -> None:
        """Tells who streams it."""
        self.changed.set()
        self.changed = Event()


class FakePolicy:
    """Makes tokens for any number of requests.

    Args:
        models: Number of each directory that weights can be loaded from; the first is what it starts with.
        vocab_size: Ids are below it.
        max_context: Most tokens of prompt and response.
        stop_id: The end-of-sequence id.
        stop_every: A token is that id with a chance of 1 in this.

    Attributes:
        decodings: Requests that it holds, by id.
        label: What its weights are called.
        weights: Number of the model that is loaded.
        paused: `"keep"` or `"abort"`; `None` while it works.
        passes: Tokens made so far.
        wasted: Tokens that nobody got, or that were in the making when they were aborted.
    """

    def __init__(
        self,
        models: Mapping[str, int],
        *,
        vocab_size: int = 1000,
        max_context: int = 4096,
        stop_id: int = 0,
        stop_every: int = 16,
    ) -> None:
        self.models: dict[str, int] = dict(models)
        self.vocab_size: int = vocab_size
        self.max_context: int = max_context
        self.stop_id: int = stop_id
        self.stop_every: int = stop_every
        self.decodings: dict[str, Decoding] = {}
        self.resumed: Event = Event()
        self.passes: int = 0
        self.wasted: int = 0
        self._stall: Stall | None = None
        self.restart()

    def restart(self) -> None:
        """Forgets what a process forgets: weights, label, cache, pause."""
        self.weights: int = next(iter(self.models.values()))
        self.label: str = "default"
        self.paused: str | None = None
        self.cached: dict[str, int] = {}

    def add(self, decoding: Decoding) -> None:
        """Takes a request in."""
        self.decodings[decoding.id] = decoding
        known = self.cached.setdefault(decoding.cache, self.weights)
        decoding.computed_by = known

    async def decode(self, decoding: Decoding) -> None:
        """Makes its tokens; returns when it has ended. A request that is cancelled was dropped by its client.

        Cancellation: what was made is wasted.
        """
        try:
            while decoding.finish is None:
                await checkpoint()
                await self._stand_still(decoding)
                if not decoding.aborted:
                    self._make(decoding)
                else:
                    if decoding.slow:
                        self._make(decoding)
                    decoding.finish = decoding.finish or "abort"
                decoding.tell()
        except BaseException:
            self.wasted += len(decoding.ids) + 1
            raise
        finally:
            self.decodings.pop(decoding.id, None)

    def abort(self, decodings: Iterable[Decoding]) -> None:
        """Ends requests with what they have."""
        for decoding in list(decodings):
            if decoding.deaf:
                decoding.deaf -= 1
            else:
                decoding.aborted = True
                decoding.wake()

    def pause(self, mode: str) -> None:
        """Stops making tokens."""
        if self.paused is None:
            self.resumed = Event()
        self.paused = mode
        if mode == "abort":
            self.abort(self.decodings.values())
        self._wake_all()

    def resume(self) -> None:
        """Goes on."""
        self.paused = None
        self.resumed.set()
        self._wake_all()

    def load(self, path: str) -> None:
        """Loads other weights; keys and values stay as they are."""
        self.weights = self.models[path]

    def forget(self, *, running: bool) -> bool:
        """Drops the cache, and of requests that are frozen too, if asked; says whether all of it is dropped."""
        self.cached.clear()
        if running:
            for decoding in self.decodings.values():
                decoding.computed_by = self.weights
                self.cached[decoding.cache] = self.weights
        return running or not self.decodings

    @contextmanager
    def stalled(self, *, after: int) -> Generator[Stall]:
        """Requests stand still after so many tokens, one more being in the making, until the block is left."""
        self._stall = stall = Stall(after)
        try:
            yield stall
        finally:
            stall.over = True
            self._stall = None
            self._wake_all()

    def _wake_all(self) -> None:
        for decoding in self.decodings.values():
            decoding.wake()

    async def _stand_still(self, decoding: Decoding) -> None:
        while not decoding.aborted:
            stall = self._stall
            if self.paused is None:
                decoding.waiting = False
                if stall is None or len(decoding.ids) < stall.after:
                    return
            if stall is not None and self.paused is None:
                stall.arrived.set()
            decoding.standing = True
            await decoding.woken.wait()
            decoding.standing = False
        if self._stall is not None and decoding.ids:
            self.wasted += 1  # the one in the making

    def _make(self, decoding: Decoding) -> None:
        if decoding.computed_by is None:
            decoding.computed_by = self.weights
        stale = "" if decoding.computed_by == self.weights else f"stale {decoding.computed_by}"
        token = expected_token(
            [*decoding.prompt, *decoding.ids],
            vocab_size=self.vocab_size,
            stop_id=self.stop_id,
            stop_every=self.stop_every,
            version=self.weights,
            salt=stale,
        )
        self.passes += 1
        at = len(decoding.ids)
        decoding.ids.append(token)
        decoding.logprobs.append(expected_logprob(token, self.weights))
        if decoding.spans and decoding.spans[-1][0] == self.label:
            decoding.spans[-1] = (self.label, decoding.spans[-1][1], at + 1)
        else:
            decoding.spans.append((self.label, at, at + 1))
        stops = token == self.stop_id or token in decoding.stop_ids
        if stops and at + 1 >= decoding.min_tokens:
            decoding.finish = "stop"
        elif at + 1 >= decoding.max_tokens:
            decoding.finish = "length"
