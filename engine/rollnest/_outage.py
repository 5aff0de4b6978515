"""Tells a policy server that is down from a request that is bad, and keeps turns from a server that is down.

A request that fails for a reason that may pass (`InferenceError.retryable`, or an abort that nobody asked for) is sent
again, a few times, further and further apart. Only two things then decide whose fault it is:

    failures of several prompts in a row, or one turn that used up its tries
        -> the gate is barred, and one small request that has worked before is sent, alone: the probe
    the probe works      -> the server is fine; a turn that used up its tries has one more, then its sample fails
    the probe fails too  -> an outage: probed again and again, further and further apart; what failed in it is
                            forgiven, and nothing fails because of it
    no request works for too long -> the engine breaks, with the last causes

A request whose server is gone while others of the policy live (`InferenceError.failover`) is sent again at once, and
proves nothing of this; unless one turn meets that too often in a row.

So a server that is down costs no prompt, and a prompt that the server can't take costs no other one anything. "In a
row" and "since" are counted in failures, not in seconds: a request proves something about the server if it was sent
after so many failures and worked.
"""

from __future__ import annotations

from collections import deque

from anyio import sleep
from anyio.lowlevel import checkpoint

from ._attempt import Attempt, TokenCounters
from ._bell import Bell
from ._gate import Gate
from ._instruments import Instruments
from .errors import InferenceError, describe

__all__ = ["Outage", "Retries"]

_TRIES = 5  # requests of one turn, until somebody has to be proved alive
_FIRST_WAIT = 0.25  # seconds before a request is sent again; doubled each time
_IN_A_ROW = 5  # failures of more than one prompt
_CAUSES = 5  # how many of the last errors are kept
_SUSPECTS = 16  # prompts whose failed request is kept, to probe with until any request has worked


class Outage:
    """Whether the policy's server works, as far as requests can tell. Synchronous; `Prober` acts on it.

    Attributes:
        failures: Requests that failed so far, for a reason that may pass.
        proof: A request that was sent after so many failures has worked; no failure before it means anything now.
        good: The last attempt that brought tokens.
        counters: Where the tokens of probes went; they are in no record.
        count: Outages so far.
        seconds: How long they took, those that are over; pauses are not counted.
        bell: Rung when the gate was barred, or when there is something new to probe with.
    """

    def __init__(self, gate: Gate, instruments: Instruments, limit: float) -> None:
        self.failures: int = 0
        self.proof: int = 0
        self.good: Attempt | None = None
        self.counters: TokenCounters = TokenCounters()
        self.count: int = 0
        self.seconds: float = 0.0
        self.bell: Bell = Bell()
        self._gate = gate
        self._instruments = instruments
        self._limit = limit
        self._on = False  # told to be an outage, and not over
        self._barred_at = 0.0
        self._since = 0.0  # when it was barred, or a request last worked
        self._spent = 0.0  # of the limit, in times before that it was barred
        self._suspects: dict[str, tuple[int, Attempt]] = {}
        self._errors: deque[InferenceError] = deque(maxlen=_CAUSES)

    @property
    def barred(self) -> bool:
        """Whether turns are kept from the server."""
        return self._gate.barred

    @property
    def left(self) -> float:
        """Seconds until the engine gives up, if no request works."""
        return self._limit - self._spent - (self._gate.open_seconds - self._since)

    @property
    def causes(self) -> tuple[InferenceError, ...]:
        """What the last requests failed with, oldest first; without tracebacks, so that they hold nothing alive."""
        return tuple(self._errors)

    def worked(self, mark: int) -> None:
        """Takes note of a request that brought tokens; only needed if any has failed.

        Args:
            mark: `failures` when it was sent. It says nothing about those that came later.
        """
        self._spent = 0.0
        self._since = self._gate.open_seconds
        self._prove(mark)
        if self._gate.barred:
            self.bell.ring()

    def _prove(self, mark: int) -> None:
        if mark > self.proof:
            self.proof = mark
            if mark == self.failures:
                self._suspects.clear()
                self._errors.clear()

    def failed(self, prompt: str, error: Exception, attempt: Attempt) -> int:
        """Takes note of a request that failed.

        Returns:
            Its number.
        """
        self.failures += 1
        self._errors.append(_plain(error))
        self._suspects.pop(prompt, None)
        self._suspects[prompt] = self.failures, attempt
        for name, (number, _) in list(self._suspects.items()):
            if number <= self.proof or len(self._suspects) > _SUSPECTS:
                del self._suspects[name]
        if self.failures - self.proof >= _IN_A_ROW and len(self._suspects) > 1:
            self.doubt()
        return self.failures

    def doubt(self) -> None:
        """Keeps turns from the server until a probe has worked."""
        if not self._gate.barred:
            self._barred_at = self._since = self._gate.open_seconds
            self._gate.bar()
            self.bell.ring()

    def probe(self, number: int) -> Attempt:
        """What to probe with: the last request that worked; while none ever has, one that failed, each in its turn."""
        if self.good is not None:
            return self.good.probe(self._gate.version, self.counters)
        suspects = [attempt for _, attempt in self._suspects.values()]
        suspect = suspects[number % len(suspects)]
        return suspect.probe(self._gate.version, self.counters)

    def unanswered(self, error: Exception) -> None:
        """Takes note of a probe that failed: it is an outage."""
        self._errors.append(_plain(error))
        if not self._on:
            self._on = True
            self.count += 1
            self._instruments.tell("outage_began", error)

    def answered(self, mark: int) -> None:
        """Takes note of a probe that worked, and lets turns through again."""
        gate = self._gate
        self._prove(mark)
        self._spent += gate.open_seconds - self._since
        seconds = gate.open_seconds - self._barred_at
        gate.unbar()
        if self._on:
            self._on = False
            self.seconds += seconds
            self._instruments.tell("outage_ended", seconds)

    @property
    def state(self) -> str | None:
        """What is the matter, in words; `None` if nothing is."""
        seconds = self._gate.open_seconds - self._barred_at
        if self._on:
            return f"the server is down for {seconds:.1f} s, {self.left:.1f} s until the engine gives up"
        if self._gate.barred:
            return f"the server is probed for {seconds:.1f} s, because requests failed"
        return None

    def __repr__(self) -> str:
        if self._on:
            state = f"for {self._gate.open_seconds - self._barred_at:.1f} s, {self.left:.1f} s left"
        else:
            state = "suspected" if self._gate.barred else "none"
        return f"<Outage {state}, {self.count} so far, {self.failures} requests failed>"


def _plain(error: Exception) -> InferenceError:
    text = str(error) if isinstance(error, InferenceError) else describe(error)
    return InferenceError(text, retryable=True)


class Retries:
    """The requests of one turn that failed in a row."""

    def __init__(self, outage: Outage, prompt: str) -> None:
        self._outage = outage
        self._prompt = prompt
        self._tries = 0
        self._sent = 0
        self._moves = 0  # to another server, in a row
        self._last = 0  # number of the last failure
        self._outages = outage.count

    async def again(self, error: InferenceError, attempt: Attempt, *, gained: bool) -> None:
        """Takes note of a failure, and returns when the request may go to the gate again.

        Args:
            error: What it failed with.
            attempt: The request.
            gained: Whether the turn has got further by it.

        Raises:
            InferenceError: The server works, so the request is to blame.

        Cancellation: the failure is taken note of all the same.
        """
        if gained:
            self._moves = 0
        if error.failover and self._moves < _TRIES:
            self._moves += 1
            await checkpoint()
            return
        outage = self._outage
        proved = self._tries > 0 and outage.proof >= self._last
        if self._outages != outage.count:
            self._outages = outage.count
            self._tries = 0  # those were the server's
        if gained:
            self._tries = 0
        self._tries += 1
        self._sent += 1
        self._last = outage.failed(self._prompt, error, attempt)
        if self._tries >= _TRIES:
            if proved:
                await checkpoint()
                raise InferenceError(
                    f"{error}; sent {self._sent} times, while other requests worked",
                    retryable=True,
                ) from error
            outage.doubt()
        if outage.barred:
            await checkpoint()
        else:
            await sleep(_FIRST_WAIT * 2 ** (self._tries - 1))
