"""Memory of tensors that is given back and taken again, while the tensors stay the same objects.

It is done to their storages, so every view keeps its shape and place: of tied weights, of the cache's parts. Nobody may
look at the tensors meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Freed"]


class Freed:
    """Tensors whose memory was given back.

    Args:
        tensors: They may share storages.
        keep: Whether what they hold is kept, in memory of the host; else they are zero afterwards.

    If it can't be built nothing was given back.
    """

    def __init__(self, tensors: Iterable[Tensor], *, keep: bool) -> None:
        storages: dict[int, Any] = {}
        for tensor in tensors:
            storage: Any = tensor.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage
        # All copies first: if there is no room for them, nothing has changed.
        self._left = [(s, s.nbytes(), _copy(s) if keep else None) for s in storages.values()]
        for storage, _, _ in self._left:
            storage.resize_(0)

    def restore(self) -> None:
        """Takes the memory again. If that fails, it can be called again for the rest."""
        while self._left:
            storage, size, held = self._left[-1]
            storage.resize_(size)
            if held is None:
                storage.fill_(0)
            else:
                storage.copy_(held)
            self._left.pop()

    def __repr__(self) -> str:
        return f"<Freed {sum(size for _, size, _ in self._left)} bytes>"


def _copy(storage: Any) -> Any:
    return storage.clone() if storage.device.type == "cpu" else storage.cpu()
