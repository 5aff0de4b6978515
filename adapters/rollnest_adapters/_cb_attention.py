"""Attention over a packed batch for CPUs.

Continuous batching packs all requests into one row. What transformers has for CPUs scores every query against every
key of *all* requests and masks the rest away: quadratic in the number of requests. Here each request is scored against
its own keys only, in buckets of similar shape, padded; and keys and values are copied out of the cache once, by whole
pages.

It is registered under its own name and serves the generation loop only. Any other caller of the model gets
transformers' `sdpa`, so the model stays usable from outside while the loop runs.
"""

# transformers' annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import math
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from torch import Tensor

NAME = "rollnest_packed"

_loop = threading.local()


def fits(model: Any) -> bool:
    """Whether the packed attention can stand in for the model's own.

    It knows causal attention over whole contexts on CPUs: no sliding window, no soft cap, no attention sinks.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        model.device.type == "cpu"
        and model.config._attn_implementation in ("sdpa", "eager")
        and kinds == {"full_attention"}
        and getattr(config, "sliding_window", None) is None
        and getattr(config, "attn_logit_softcapping", None) is None
        and not any(hasattr(module, "sinks") for module in model.modules())
    )


def register() -> None:
    """Makes the attention known to transformers. Idempotent."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


def take_over(cache: Any) -> None:
    """Lets a paged cache leave the reading to the attention."""
    cache.update = partial(_write, cache)


def enter_loop() -> None:
    """Says that the calling thread is a generation loop: its batches need no mask."""
    _loop.active = True


class _Rows:
    """How keys lie in one batch that reads nothing from the cache: one row for each token."""

    def __init__(self) -> None:
        self.plan: _Plan | None = None

    def width(self, longest: int) -> int:
        return longest

    def table(self, starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
        at = torch.arange(longest)
        return (starts[:, None] + at.minimum(lengths[:, None] - 1)).flatten()

    def take(self, source: Tensor, table: Tensor, size: int) -> Tensor:
        """Returns the keys of `size` requests, [requests, heads, tokens, head size]."""
        tokens = source[0].transpose(0, 1)
        return tokens.index_select(0, table).view(size, -1, *tokens.shape[1:]).transpose(1, 2)


class _Pages(_Rows):
    """How keys lie in the cache: pages of which a request has all tokens in order, but for the rest of the last."""

    def __init__(self, read_index: Tensor, page_size: int) -> None:
        super().__init__()
        self._read_index = read_index
        self._page_size = page_size

    def width(self, longest: int) -> int:
        return math.ceil(longest / self._page_size) * self._page_size

    def table(self, starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
        last = (lengths[:, None] - 1) // self._page_size
        page = torch.arange(math.ceil(longest / self._page_size)).minimum(last)
        first_tokens = self._read_index[starts[:, None] + page * self._page_size]
        return (first_tokens // self._page_size).flatten()

    def take(self, source: Tensor, table: Tensor, size: int) -> Tensor:
        return source.index_select(0, table).view(size, -1, *source.shape[2:]).transpose(1, 2)


class _Bucket:
    """Requests of similar shape, padded to one: which rows they read, and what each query may see."""

    __slots__ = ("mask", "queries", "query_rows", "real", "size", "table")

    def __init__(
        self, rows: _Rows, spans: list[tuple[int, int, int, int]], dtype: torch.dtype
    ) -> None:
        spans_by_part = zip(*spans, strict=True)
        q_start, q_length, k_start, k_length = (torch.tensor(part) for part in spans_by_part)
        longest_q, longest_k = int(q_length.max()), int(k_length.max())
        q_at = torch.arange(longest_q)
        self.size = len(spans)
        self.table = rows.table(k_start, k_length, longest_k)
        self.queries = (q_start[:, None] + q_at.minimum(q_length[:, None] - 1)).flatten()
        real = q_at < q_length[:, None]
        self.real = None if bool(real.all()) else real.flatten().nonzero().squeeze(1)
        self.query_rows = self.queries if self.real is None else self.queries[self.real]
        # The last query of a request sees all of its keys, the one before it all but one, and so on.
        sees = (k_length - q_length)[:, None] + q_at
        hidden = torch.arange(rows.width(longest_k)) > sees[:, :, None]
        # Added to the scores; of booleans every layer would make this again.
        self.mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)[:, None]


class _Plan:
    """How one packed batch falls into buckets; the same for all layers, so it is made once per forward pass."""

    __slots__ = ("buckets",)

    def __init__(
        self, rows: _Rows, q_ends: list[int], k_ends: list[int], dtype: torch.dtype
    ) -> None:
        groups: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        for i in range(len(q_ends) - 1):
            q_length, k_length = q_ends[i + 1] - q_ends[i], k_ends[i + 1] - k_ends[i]
            # Powers of two bound the padding: less than double in each direction.
            group = groups.setdefault((q_length.bit_length(), k_length.bit_length()), [])
            group.append((q_ends[i], q_length, k_ends[i], k_length))
        self.buckets = [_Bucket(rows, spans, dtype) for spans in groups.values()]


def _write(
    cache: Any, keys: Tensor, values: Tensor, layer: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Stands for `PagedAttentionCache.update`: writes, and returns where to read instead of what."""
    allocator = cache.layer_to_allocator[layer]
    # One object for all layers of a forward pass: the list it comes in is made anew for each.
    batch = kwargs["read_index"]
    if not isinstance(batch[-1], _Rows):
        index = batch[allocator.index]
        batch.append(_Pages(index, allocator.tokens_per_page) if len(index) else _Rows())
    kwargs[NAME] = batch[-1]
    kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][allocator.layer_type]
    write_index = kwargs["write_index"][allocator.index]
    for pool, new in zip(allocator._kv_token_views[layer], (keys, values), strict=True):
        pool.index_copy_(0, write_index, new[0].transpose(0, 1))
    if isinstance(batch[-1], _Pages):
        pages: tuple[Tensor, Tensor] = allocator._kv_page_views[layer]
        return pages
    return keys, values


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    rows: _Rows | None = kwargs.get(NAME)
    if rows is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if rows.plan is None:
        q_ends, k_ends = kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"].tolist()
        rows.plan = _Plan(rows, q_ends, k_ends, query.dtype)
    tokens = query[0].transpose(0, 1)
    out = tokens.new_empty(tokens.shape)
    for bucket in rows.plan.buckets:
        queries = tokens.index_select(0, bucket.queries).view(bucket.size, -1, *tokens.shape[1:])
        keys = rows.take(key, bucket.table, bucket.size)
        values = rows.take(value, bucket.table, bucket.size)
        part = scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys,
            values,
            attn_mask=bucket.mask,
            scale=scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        found = part.transpose(1, 2).reshape(-1, *out.shape[1:])
        out.index_copy_(0, bucket.query_rows, found if bucket.real is None else found[bucket.real])
    return out[None], None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return None if getattr(_loop, "active", False) else sdpa_mask(*args, **kwargs)
