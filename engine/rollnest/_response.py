"""The packed, append-only answer of one token context.

A `Response` has five columns of one length: ids and logprobs, token by token; versions and origin, kept as runs of one
version; and the mask, derived from them. There are two ways in, one for tokens that the policy sampled and one for
tokens that something else put there, and each checks everything before it changes anything. So the columns can't go
out of step, whatever user code does.

Invariants: I1 (one length), I2 (context has no version and logprob 0.0), I3 (policy logprobs are finite and
<= 0 up to rounding; versions never decrease).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from math import isfinite

__all__ = ["CONTEXT_VERSION", "LOGPROB_ROUNDING", "Response", "token_column"]

CONTEXT_VERSION = -1
"""What the `versions` column holds where a token has no version, because no policy made it."""

LOGPROB_ROUNDING = 1e-4
"""How far above zero a server's rounding may put a logprob."""

# Columns are looked through by the top bytes of their numbers: that makes no object for any of them.
_TOP = slice(3 if sys.byteorder == "little" else 0, None, 4)
# Float32 with these top bytes are between -2**127 and -0.0, or between 0.0 and 2**-15, which is below the rounding.
_PLAIN_LOGPROB = bytes([*range(0x38), *range(0x80, 0xFF)])

_POLICY = b"\x01"
_CONTEXT = b"\x00"


class Response:
    """Token columns that only grow.

    Columns are read as memory views over packed arrays, so numpy and torch take them without a Python loop:
    `np.asarray(response.ids)`. A view of a response that still grows is a copy of what it held at that moment.

    Cost: 8 bytes a token, plus at most 48 for each run of one version.
    """

    __slots__ = (
        "_ids",
        "_last_version",
        "_logprobs",
        "_policy_tokens",
        "_runs",
        "_sealed",
    )

    def __init__(self) -> None:
        self._ids = array("i")
        self._logprobs = array("f")
        self._policy_tokens = 0
        self._runs: tuple[
            int, ...
        ] = ()  # of each run of one version: where it stops, and the version
        self._last_version = 0
        self._sealed = False

    @classmethod
    def sampled(
        cls, ids: Iterable[int], logprobs: Iterable[float], versions: int | Sequence[int]
    ) -> Response:
        """Returns a response of tokens that the policy sampled, which may still grow.

        Args:
            ids: Token ids, >= 0.
            logprobs: One logprob for each id, in nats, of the distribution it was sampled from.
            versions: Weight version of all of them, or one for each; never below an earlier one.

        Raises:
            ValueError: A rule is broken.
            TypeError: Something is no number.
        """
        new_ids = token_column(ids)
        new_logprobs = array("f", logprobs)
        count = len(new_ids)
        if count != len(new_logprobs):
            raise ValueError(f"{count} ids but {len(new_logprobs)} logprobs")
        if not count:
            return cls()
        if new_logprobs.tobytes()[_TOP].translate(None, _PLAIN_LOGPROB):  # unusual, or broken
            for at, value in enumerate(new_logprobs):
                if not isfinite(value) or value > LOGPROB_ROUNDING:
                    raise ValueError(f"logprobs[{at}] must be finite and <= 0, got {value}")
        response = cls.__new__(cls)  # without columns, which would only be replaced
        response._ids = new_ids
        response._logprobs = new_logprobs
        response._policy_tokens = count
        if isinstance(versions, int):
            _check_version(versions, 0)
            response._runs = (count, versions)
            response._last_version = versions
        else:
            if len(versions) != count:
                raise ValueError(f"{count} ids but {len(versions)} versions")
            response._runs = ()
            response._last_version = 0
            for length, version in _runs_of(versions):
                _check_version(version, response._last_version)
                response._extend_run(length, version)
        response._sealed = False
        return response

    # Reading

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> memoryview[int]:
        """Token ids, int32."""
        return _view(self._ids, self._sealed)

    @property
    def packed_ids(self) -> array[int]:
        """The live column of ids itself, for reading at once; not to be kept."""
        return self._ids

    @property
    def last_id(self) -> int | None:
        """The last token's id; `None` if there is none."""
        return self._ids[-1] if self._ids else None

    @property
    def ends_with_policy(self) -> bool:
        """Whether the policy sampled the last token."""
        return bool(self._runs) and self._runs[-1] != CONTEXT_VERSION

    @property
    def logprobs(self) -> memoryview[float]:
        """Logprob of each token when it was sampled, float32; 0.0 where the policy did not sample it."""
        # The cast pair tells the type checker what the array's own format already says.
        return _view(self._logprobs, self._sealed).cast("B").cast("f")

    @property
    def origin(self) -> memoryview[int]:
        """Who made each token, uint8: 1 the policy, 0 anything else."""
        parts = [
            (_CONTEXT if version == CONTEXT_VERSION else _POLICY) * (stop - start)
            for version, start, stop in self.version_runs
        ]
        return memoryview(b"".join(parts))

    @property
    def versions(self) -> memoryview[int]:
        """Weight version that sampled each token, int32; `CONTEXT_VERSION` (-1) for context tokens."""
        column = array("i")
        for version, start, stop in self.version_runs:
            column.extend(array("i", (version,)) * (stop - start))
        return memoryview(column).toreadonly()

    @property
    def version_runs(self) -> tuple[tuple[int, int, int], ...]:
        """Runs of one version, in order, as `(version, start, stop)`; context has `CONTEXT_VERSION`."""
        stops = self._runs[::2]
        return tuple(zip(self._runs[1::2], (0, *stops), stops, strict=False))

    @property
    def oldest_version(self) -> int | None:
        """The lowest version among the policy's tokens; `None` without any."""
        # Versions never decrease, so the first policy run is the oldest; it is among the first two runs.
        runs = self._runs
        if not runs:
            return None
        if runs[1] != CONTEXT_VERSION:
            return runs[1]
        return runs[3] if len(runs) > 2 else None

    @property
    def newest_version(self) -> int | None:
        """The highest version among the policy's tokens; `None` without any."""
        return None if self.oldest_version is None else self._last_version

    @property
    def policy_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return self._policy_tokens

    @property
    def sealed(self) -> bool:
        """Whether the response may no longer grow."""
        return self._sealed

    def __getitem__(self, part: slice) -> Response:
        """Returns a sealed copy of a part; only slices without a step."""
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"a response is sliced without a step, got step={step}")
        stop = max(start, stop)
        piece = Response()
        piece._ids = self._ids[start:stop]
        piece._logprobs = self._logprobs[start:stop]
        piece._sealed = True
        if stop - start == len(self):  # a copy of it all: nothing has to be looked through
            piece._policy_tokens = self._policy_tokens
            piece._runs = self._runs
            piece._last_version = self._last_version
            return piece
        for version, run_start, run_stop in self.version_runs:
            length = min(run_stop, stop) - max(run_start, start)
            if length > 0:
                piece._extend_run(length, version)
                if version != CONTEXT_VERSION:
                    piece._policy_tokens += length
        return piece

    def __getstate__(self) -> tuple[object, ...]:
        """What a pickle holds: packed columns, a few bytes a token."""
        return tuple(getattr(self, name) for name in self.__slots__)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        for name, value in zip(self.__slots__, state, strict=True):
            setattr(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Response):
            return NotImplemented
        return (
            self._ids == other._ids
            and self._logprobs == other._logprobs
            and self._runs == other._runs
        )

    def __hash__(self) -> int:
        raise TypeError("a response can't be hashed: it grows")

    def __repr__(self) -> str:
        runs = ", ".join(
            f"{stop - start} context"
            if version == CONTEXT_VERSION
            else f"{stop - start} by v{version}"
            for version, start, stop in self.version_runs
        )
        return f"<Response of {len(self)} tokens: {runs or 'empty'}{', sealed' if self._sealed else ''}>"

    # Growing

    def append_policy(
        self, ids: Iterable[int], logprobs: Iterable[float], versions: int | Sequence[int]
    ) -> None:
        """Appends tokens that the policy sampled.

        Args:
            ids: Token ids, >= 0.
            logprobs: One logprob for each id, in nats, of the distribution it was sampled from.
            versions: Weight version of all of them, or one for each; never below an earlier one.

        Raises:
            ValueError: A rule is broken; the response is unchanged.
            TypeError: Something is no number, or the response is sealed; the response is unchanged.
        """
        self.extend(Response.sampled(ids, logprobs, versions))

    def append_context(self, ids: Iterable[int]) -> None:
        """Appends tokens that the policy did not sample: tool results, environment text, chat headers.

        Args:
            ids: Token ids, >= 0.

        Raises:
            ValueError: An id is negative or too large; the response is unchanged.
            TypeError: An id is no integer, or the response is sealed; the response is unchanged.
        """
        new_ids = token_column(ids)
        self._check_open()
        if new_ids:
            self._ids.extend(new_ids)
            self._logprobs.frombytes(bytes(4 * len(new_ids)))
            self._extend_run(len(new_ids), CONTEXT_VERSION)

    def extend(self, other: Response) -> None:
        """Appends everything another response holds.

        Raises:
            ValueError: The other one starts with an older version; this one is unchanged.
            TypeError: This response is sealed.
        """
        runs = other._runs
        is_one_run = len(runs) == 2  # what a request mostly brings
        oldest = runs[1] if is_one_run else other.oldest_version
        if oldest is not None and oldest != CONTEXT_VERSION and oldest < self._last_version:
            raise ValueError(f"versions never decrease: {oldest} after {self._last_version}")
        self._check_open()
        self._ids.extend(other._ids)
        self._logprobs.extend(other._logprobs)
        self._policy_tokens += other._policy_tokens
        if is_one_run:
            self._extend_run(runs[0], runs[1])
            return
        for version, start, stop in other.version_runs:  # a copy: it may be extended by itself
            self._extend_run(stop - start, version)

    def seal(self) -> Response:
        """Ends the growing, and returns the response; views are without a copy from now on."""
        self._sealed = True
        return self

    def without_trailing_context(self) -> Response:
        """Returns a sealed response that ends with the policy's last token."""
        runs, stop = self._runs, len(self._ids)
        if runs and runs[-1] == CONTEXT_VERSION:
            stop = runs[-4] if len(runs) > 2 else 0  # two runs of context are one
        return self[:stop]

    def _check_open(self) -> None:
        if self._sealed:
            raise TypeError("the response is sealed: its sample has ended")

    def _extend_run(self, length: int, version: int) -> None:
        runs = self._runs
        if not runs:
            self._runs = (length, version)
        elif runs[-1] == version:
            self._runs = (*runs[:-2], runs[-2] + length, version)
        else:
            self._runs = (*runs, runs[-2] + length, version)
        if version != CONTEXT_VERSION:
            self._last_version = version


# As a constant: `list | array` in the call would be made anew for every answer.
_PACKABLE = (list, array, tuple, memoryview)


def token_column(ids: Iterable[int]) -> array[int]:
    """Packs token ids as int32.

    Raises:
        ValueError: An id is negative or does not fit; the message has its position and value.
        TypeError: An id is no integer.
    """
    values: Sequence[int] | array[int] | memoryview[int]
    if isinstance(ids, _PACKABLE):
        values = ids
    elif isinstance(ids, str | bytes | bytearray):
        raise TypeError(f"ids must be integers, got {type(ids).__name__}")
    else:
        values = ids if isinstance(ids, Sequence) else list(ids)
    try:
        column = array("i", values)
    except OverflowError:
        raise ValueError(f"an id does not fit 32 bits: {max(values, key=abs)}") from None
    if not column.tobytes()[_TOP].isascii():  # the sign is the top bit
        at = next(i for i, v in enumerate(column) if v < 0)
        raise ValueError(f"ids[{at}] must be >= 0, got {column[at]}")
    return column


def _view(column: array[int] | array[float], sealed: bool) -> memoryview[int]:
    # An exported view would forbid the array to grow, so a live response gives a copy away.
    return memoryview(column if sealed else column[:]).toreadonly()


def _check_version(version: int, last: int) -> None:
    if version < last:
        raise ValueError(f"versions never decrease: {version} after {last}")
    if version >= 2**31:
        raise ValueError(f"a version must fit 32 bits, got {version}")


def _runs_of(versions: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for version in versions:
        if version < 0:
            raise ValueError(f"a version must be >= 0, got {version}")
        if runs and runs[-1][1] == version:
            runs[-1] = (runs[-1][0] + 1, version)
        else:
            runs.append((1, version))
    return runs
