"""Training tensors from the groups of a `Batch`: packed into one line, or padded into rows.

    packed = pack(batch, advantages.grpo)
    logits = model(
        packed.input_ids[None], position_ids=packed.position_ids[None], use_cache=False
    ).logits[0]

A transformers model tells packed rows apart by their position ids, but only without a cache: with `use_cache=True`,
its default, rows would attend to each other.

Every segment of every sample is one row: its prompt, then its response. Position `t` of a row holds token `t`, and
everything that a loss needs about the token *after* it: label, advantage, logprob, version. So the last position of
a row has no label, no label ever comes from another row, and a rollout's logprobs stand where the trainer computes
its own: `log_softmax(logits).gather(-1, labels)`.

Invariants:

- I6: a label is -100 exactly where nothing is trained (prompt, context, padding, the end of a row), and there the
  advantage and the logprob are 0.0 and the version is -1. What is trained comes from the mask alone, never from a
  token's value, so a sampled end-of-sequence id is trained even where it equals the padding id.
- All columns have one length.
- Every token that the policy sampled has exactly one label. A segment without one has no row.

Select with `mask`, never multiply by it: 0 times NaN is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch
from attrs import field, frozen
from numpy.typing import NDArray
from torch import Tensor

from rollnest import CONTEXT_VERSION, Batch, Group, Sample, Segment, Status
from rollnest.advantages import Estimator, GroupKey, for_groups

__all__ = ["IGNORED", "Advantages", "Packed", "Padded", "Row", "pack", "pad"]

IGNORED = -100
"""The label of a position where nothing is trained; what `torch.nn.functional.cross_entropy` ignores by default."""

Advantages: TypeAlias = "Estimator | Mapping[GroupKey, Sequence[float]]"
"""An estimator such as `rollnest.advantages.grpo`, or advantages by group, as `rollnest.advantages.for_groups` returns
them: one for each sample, in the group's order."""


@frozen(eq=False)
class Row:
    """Where a row comes from.

    Attributes:
        sample: The sample.
        segment: Index of the segment in it.
    """

    sample: Sample
    segment: int


@frozen(eq=False, kw_only=True)
class Packed:
    """Rows one after another. Every column has the shape `(tokens,)`.

    Attributes:
        input_ids: int64. Prompt and response of each row, whole.
        labels: int64. The next token's id where it is trained, else -100.
        advantages: float32. Its sample's advantage there, else 0.0.
        logprobs: float32. The next token's logprob when it was sampled, else 0.0.
        versions: int64. The weight version that sampled it, else -1.
        position_ids: int64. Counts from 0 in each row.
        cu_seqlens: int32, shape `(rows + 1,)`. Row `i` is `cu_seqlens[i]:cu_seqlens[i + 1]`, as attention kernels for
            variable lengths take it.
        rows: What each row is.
    """

    input_ids: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    advantages: Tensor = field(repr=False)
    logprobs: Tensor = field(repr=False)
    versions: Tensor = field(repr=False)
    position_ids: Tensor = field(repr=False)
    cu_seqlens: Tensor = field(repr=False)
    rows: tuple[Row, ...] = field(repr=lambda rows: str(len(rows)))

    @property
    def mask(self) -> Tensor:
        """bool, shape `(tokens,)`. Where there is something to train."""
        return self.labels != IGNORED

    @property
    def lengths(self) -> Tensor:
        """int64, shape `(rows,)`. Tokens of each row."""
        return self.cu_seqlens.diff().long()

    def unpack(self, column: Tensor) -> tuple[Tensor, ...]:
        """Splits a tensor of `tokens` entries, such as a column or new logprobs, into one view for each row."""
        return tuple(column.tensor_split(self.cu_seqlens[1:-1].long().cpu()))

    def to(self, device: torch.device | str) -> Packed:
        """Returns the same on another device."""
        return Packed(rows=self.rows, **_moved(self, device))


@frozen(eq=False, kw_only=True)
class Padded:
    """Rows one below another, padded on the right. Every column has the shape `(rows, length)`.

    Attributes:
        input_ids: int64. Prompt and response of each row, whole, then the padding id.
        labels: int64. The next token's id where it is trained, else -100.
        advantages: float32. Its sample's advantage there, else 0.0.
        logprobs: float32. The next token's logprob when it was sampled, else 0.0.
        versions: int64. The weight version that sampled it, else -1.
        position_ids: int64. Counts from 0 in each row; 0 in the padding.
        attention_mask: int64. 1 for the row's own tokens, 0 for padding. Says nothing about what is trained.
        rows: What each row is.
    """

    input_ids: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    advantages: Tensor = field(repr=False)
    logprobs: Tensor = field(repr=False)
    versions: Tensor = field(repr=False)
    position_ids: Tensor = field(repr=False)
    attention_mask: Tensor = field(repr=False)
    rows: tuple[Row, ...] = field(repr=lambda rows: str(len(rows)))

    @property
    def mask(self) -> Tensor:
        """bool, shape `(rows, length)`. Where there is something to train."""
        return self.labels != IGNORED

    def to(self, device: torch.device | str) -> Padded:
        """Returns the same on another device."""
        return Padded(rows=self.rows, **_moved(self, device))


def pack(
    groups: Batch | Iterable[Group], advantages: Advantages, *, max_length: int | None = None
) -> Packed:
    """Makes training tensors without padding.

    Args:
        groups: A batch, or some of its groups.
        advantages: An estimator, or the advantages by group.
        max_length: Most tokens of one row; nothing is ever cut to fit.

    Raises:
        ValueError: A sample is not completed, has no reward for the estimator, or a row longer than `max_length`; a
            group is there twice, or its advantages are missing, too few or not finite; logprobs of some are raw and
            of others processed; or no row is left.
    """
    columns = _columns(groups, advantages, max_length)
    return Packed(
        **columns.tensors(),
        cu_seqlens=torch.as_tensor(np.append(0, columns.lengths.cumsum()).astype(np.int32)),
        rows=columns.rows,
    )


def pad(
    groups: Batch | Iterable[Group],
    advantages: Advantages,
    *,
    max_length: int | None = None,
    length: int | None = None,
    pad_token_id: int = 0,
) -> Padded:
    """Makes training tensors of one length, padded on the right.

    Args:
        groups: A batch, or some of its groups.
        advantages: An estimator, or the advantages by group.
        max_length: Most tokens of one row; nothing is ever cut to fit.
        length: What to pad to; `None` is the longest row. A longer row is refused as with `max_length`.
        pad_token_id: What stands in the padding; any id, the end of sequence too.

    Raises:
        ValueError: As `pack`.
    """
    limits = [limit for limit in (max_length, length) if limit is not None]
    columns = _columns(groups, advantages, min(limits, default=None))
    longest = int(columns.lengths.max())
    width = longest if length is None else length
    own = torch.arange(width) < torch.as_tensor(columns.lengths)[:, None]
    padding = {"input_ids": pad_token_id, "labels": IGNORED, "versions": CONTEXT_VERSION}
    padded: dict[str, Tensor] = {}
    for name, column in columns.tensors().items():
        padded[name] = column.new_full(own.shape, padding.get(name, 0))
        padded[name][own] = column
    return Padded(**padded, attention_mask=own.long(), rows=columns.rows)


@frozen(eq=False)
class _Columns:
    """All rows in one line, as arrays."""

    rows: tuple[Row, ...]
    lengths: NDArray[np.int64]
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    advantages: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    position_ids: NDArray[np.int64]

    def tensors(self) -> dict[str, Tensor]:
        """The columns by name."""
        names = ("input_ids", "labels", "advantages", "logprobs", "versions", "position_ids")
        return {name: torch.as_tensor(getattr(self, name)) for name in names}


def _columns(
    groups: Batch | Iterable[Group], advantages: Advantages, max_length: int | None
) -> _Columns:
    chosen = groups.groups if isinstance(groups, Batch) else tuple(groups)
    by_group = _by_group(chosen, advantages)
    rows: list[Row] = []
    weights: list[float] = []
    for group in chosen:
        for sample, advantage in zip(group.samples, by_group[group.task, group.visit], strict=True):
            own = list(_rows(sample, max_length))
            rows += own
            weights += [advantage] * len(own)
    if not rows:
        raise ValueError(
            f"{len(chosen)} groups hold no trainable token, so there is nothing to train"
        )
    return _line_up(rows, weights)


def _line_up(rows: Sequence[Row], weights: Sequence[float]) -> _Columns:
    segments = [row.sample.segments[row.segment] for row in rows]
    prompts = [len(segment.prompt_ids) for segment in segments]
    lengths = np.array([p + len(s) for p, s in zip(prompts, segments, strict=True)], np.int64)
    parts: list[NDArray[Any]] = []
    for segment in segments:
        parts += [np.asarray(segment.prompt_ids), np.asarray(segment.ids)]
    input_ids = np.concatenate(parts).astype(np.int64)
    # A row begins with a prompt, and nothing of a prompt is trained. So looking one token ahead over the whole line
    # finds no label at the end of a row, where it looks into the next row (or, from the last, into the first).
    trained = _ahead(_after_prompts(segments, prompts, "mask", 0)).astype(np.bool_)
    starts = np.repeat(lengths.cumsum() - lengths, lengths)
    return _Columns(
        rows=tuple(rows),
        lengths=lengths,
        input_ids=input_ids,
        labels=np.where(trained, _ahead(input_ids), IGNORED),
        advantages=np.where(trained, np.repeat(np.array(weights, np.float32), lengths), 0).astype(
            np.float32
        ),
        logprobs=_chosen(trained, segments, prompts, "logprobs", 0.0).astype(np.float32),
        versions=_chosen(trained, segments, prompts, "versions", CONTEXT_VERSION).astype(np.int64),
        position_ids=np.arange(len(input_ids)) - starts,
    )


def _chosen(
    trained: NDArray[np.bool_],
    segments: Sequence[Segment],
    prompts: Sequence[int],
    name: str,
    filler: float,
) -> NDArray[Any]:
    """A response column, seen from one token before, with a filler wherever nothing is trained."""
    return np.where(trained, _ahead(_after_prompts(segments, prompts, name, filler)), filler)


def _after_prompts(
    segments: Sequence[Segment], prompts: Sequence[int], name: str, filler: float
) -> NDArray[Any]:
    """A response column of all segments in one line, with a filler for the prompts."""
    parts: list[NDArray[Any]] = []
    for segment, prompt in zip(segments, prompts, strict=True):
        column: NDArray[Any] = np.asarray(getattr(segment, name))
        parts += [np.full(prompt, filler, column.dtype), column]
    return np.concatenate(parts)


def _ahead(column: NDArray[Any]) -> NDArray[Any]:
    return np.roll(column, -1)


def _rows(sample: Sample, max_length: int | None) -> Iterator[Row]:
    for index, segment in enumerate(sample.segments):
        if not segment.response.policy_tokens:
            continue
        if not len(segment.prompt_ids):
            raise ValueError(
                f"{_name(sample)}: segment {index} has no prompt, so nothing predicts its first token"
            )
        tokens = len(segment.prompt_ids) + len(segment)
        if max_length is not None and tokens > max_length:
            raise ValueError(
                f"{_name(sample)}: segment {index} has {tokens} tokens, above the maximum of {max_length}"
            )
        yield Row(sample, index)


def _by_group(
    groups: Sequence[Group], advantages: Advantages
) -> Mapping[GroupKey, Sequence[float]]:
    mode = next((sample.logprobs_mode for group in groups for sample in group.samples), None)
    for group in groups:
        for sample in group.samples:
            if sample.logprobs_mode != mode:
                raise ValueError(
                    f"{_name(sample)} has {sample.logprobs_mode} logprobs and others have {mode} ones: a ratio to "
                    "one means nothing for the other"
                )
            if sample.status is not Status.COMPLETED:
                raise ValueError(
                    f"{_name(sample)} is {sample.status.name}; only COMPLETED is trained"
                )
            if callable(advantages) and sample.reward is None:
                raise ValueError(f"{_name(sample)} has no reward, so it has no advantage")
    if callable(advantages):
        return for_groups(groups, advantages)
    keys = [(group.task, group.visit) for group in groups]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"group {twice[0]}/{twice[1]} is there twice")
    for group, key in zip(groups, keys, strict=True):
        values = advantages.get(key)
        if values is None:
            raise ValueError(f"advantages has none for group {group.task}/{group.visit}")
        if len(values) != len(group) or not all(map(math.isfinite, values)):
            raise ValueError(
                f"advantages of group {group.task}/{group.visit} must be {len(group)} finite numbers, "
                f"got {list(values)}"
            )
    return advantages


def _name(sample: Sample) -> str:
    return f"sample {sample.task}/{sample.visit}/{sample.index}"


def _moved(tensors: Packed | Padded, device: torch.device | str) -> dict[str, Tensor]:
    columns = attrs.asdict(
        tensors, recurse=False, filter=lambda _, value: isinstance(value, Tensor)
    )
    return {name: column.to(device) for name, column in columns.items()}
