"""Draws fresh prompts: epochs, a seeded shuffle, a position.

The order of an epoch depends on the seed, the task's name and the epoch's number alone, so a position says
exactly what was drawn and what is still to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from attrs import frozen

from ._codecs import Plain
from ._records import Prompt

__all__ = ["Sampler", "SamplerNote"]


@frozen(eq=False)
class SamplerNote:
    """Where a task's prompts are, for a checkpoint.

    Attributes:
        epoch: The epoch, counted from 0; 0 with a source.
        drawn: Prompts drawn in it.
        state: State of the user's source, if there is one.
        held: Prompts that the source gave and that no group has taken.
        ended: Whether the source has said that there are no more.
    """

    epoch: int
    drawn: int
    state: Plain = None
    held: Sequence[Prompt] = ()
    ended: bool = False


class Sampler:
    """Draws the prompts of one task, each once per epoch."""

    def __init__(
        self, task: str, prompts: Sequence[Prompt], *, epochs: int | None, shuffle: bool, seed: int
    ) -> None:
        self._task = task
        self._prompts = prompts
        self._epochs = epochs
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._drawn = 0  # in this epoch
        self._order = self._order_of(0)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, counted from 0, and how many of its prompts were drawn."""
        return self._epoch, self._drawn

    def note(self) -> SamplerNote:
        """Where it is."""
        return SamplerNote(self._epoch, self._drawn)

    def restore(self, note: SamplerNote) -> None:
        """Goes on from there.

        Raises:
            ValueError: There is no such position.
        """
        epoch, drawn = note.epoch, note.drawn
        if epoch < 0 or not 0 <= drawn < len(self._prompts):
            raise ValueError(
                f"there is no position {drawn} in epoch {epoch} of {len(self._prompts)} prompts"
            )
        self._epoch, self._drawn = epoch, drawn
        self._order = self._order_of(epoch)

    @property
    def exhausted(self) -> bool:
        """Whether every epoch is over."""
        return self._epochs is not None and self._epoch >= self._epochs

    def draw(self) -> Prompt | None:
        """Returns the next prompt; `None` once every epoch is over."""
        if self.exhausted:
            return None
        prompt = self._prompts[self._order[self._drawn]]
        self._drawn += 1
        if self._drawn == len(self._prompts):
            self._epoch, self._drawn = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return prompt

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        order = list(range(len(self._prompts)))
        Random(f"{self._seed}/{self._task}/{epoch}").shuffle(order)
        return order

    def __repr__(self) -> str:
        epochs = "endless" if self._epochs is None else f"of {self._epochs}"
        return (
            f"<Sampler {self._task!r}: epoch {self._epoch} {epochs}, "
            f"{self._drawn} of {len(self._prompts)} drawn>"
        )
