"""What makes going on from a partial neutral: seeds, stop strings across the seam, sampling checks. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from hashlib import blake2b

from attrs import fields

from ._options import Sampling
from .abc import Capabilities
from .errors import UnsupportedSampling

__all__ = ["attempt_seed", "check_sampling", "check_training", "tokens_through_stop"]


def attempt_seed(base: int, uid: str, number: int) -> int:
    """Returns a seed of 31 bits for one attempt of one rollout.

    A fixed seed sent again with the partial would draw the same randomness a second time, and a group that shares
    one would hold n copies of one sample.
    """
    digest = blake2b(f"{base}/{uid}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF


def tokens_through_stop(
    ids: Sequence[int], seam: int, stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Returns how many tokens it takes to complete a stop string; `None` if the text holds none.

    Args:
        ids: The whole turn's ids.
        seam: Where the last attempt's ids begin; no stop string was complete before it.
        stop: The strings.
        decode: Ids to text.
    """

    def holds(count: int) -> bool:
        text = decode(ids[:count])
        return any(string in text for string in stop)

    if not holds(len(ids)):
        return None
    return bisect_left(range(len(ids) + 1), True, lo=seam + 1, key=holds)


def check_sampling(sampling: Sampling, capabilities: Capabilities) -> None:
    """Raises unless a controller can honour the sampling.

    Raises:
        UnsupportedSampling: Names the field and its value.
    """
    for attribute in fields(Sampling):
        name, value = attribute.name, getattr(sampling, attribute.name)
        if name == "max_tokens" or name in capabilities.sampling:
            continue
        served = capabilities.fixed.get(name, attribute.default)  # type: ignore[call-overload]
        if value != served:
            raise UnsupportedSampling(
                f"the controller can't honour {name}={value!r}; it serves {name}={served!r} only"
            )


def check_training(sampling: Sampling, capabilities: Capabilities) -> None:
    """Raises unless samples drawn so can be trained with the logprobs that come with them.

    Raises:
        ValueError: Greedy decoding has no distribution to train.
        UnsupportedSampling: The controller can't honour the sampling, or its logprobs are of another distribution.
    """
    if sampling.temperature == 0:
        raise ValueError("temperature must be > 0 to train, got 0 (greedy is for evaluation)")
    check_sampling(sampling, capabilities)
    shaped = {
        "temperature": sampling.temperature != 1,
        "top_p": sampling.top_p != 1,
        "top_k": sampling.top_k is not None,
        "min_p": sampling.min_p is not None,
    }
    changed = [name for name, is_shaped in shaped.items() if is_shaped]
    if capabilities.logprobs == "raw" and changed:
        raise UnsupportedSampling(
            f"the controller reports raw logprobs, which are not those of sampling with "
            f"{changed[0]}={getattr(sampling, changed[0])!r}; have it report processed ones"
        )
