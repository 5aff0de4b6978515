"""Tells sequences of prompts apart: a checkpoint names prompts by their uids, and must meet the same ones again."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b

from ._codecs import fingerprint
from ._records import Prompt
from .errors import CheckpointError, LoopError

__all__ = ["fingerprint_of"]


def fingerprint_of(prompts: Iterable[Prompt], breathe: Callable[[], object] = bool) -> str:
    """Returns 32 hex digits for prompts in their order: all but `media`.

    Of what is neither JSON nor bytes and has no codec, the type alone counts.

    Args:
        prompts: The prompts.
        breathe: Called again and again.

    Raises:
        CheckpointError: A codec failed.
    """
    total = blake2b(digest_size=16)
    for prompt in prompts:
        breathe()
        told = (
            prompt.uid,
            prompt.messages,
            prompt.label,
            prompt.data_source,
            prompt.tools,
            prompt.meta,
        )
        try:
            total.update(fingerprint(told, f"prompt {prompt.uid!r} has something that").encode())
        except LoopError as error:
            raise CheckpointError(str(error)) from error.__cause__
        ids = prompt.token_ids
        total.update(b"-" if ids is None else array("q", ids).tobytes() + b".")
    return total.hexdigest()
