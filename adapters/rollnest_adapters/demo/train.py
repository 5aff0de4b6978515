"""GRPO in plain torch: what a trainer has to do with a `Batch`, and nothing else.

`train` is all that the engine asks of a trainer; `Grpo` is an ordinary torch trainer, which knows nothing of prompts,
tokenizers, judgers or the engine. Tokens of older weights need no special care: the
clipped ratio between the trainer's probability and the one at sampling time is what GRPO has for them.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import anyio.to_thread
import torch
from attrs import frozen
from torch import Tensor
from transformers import PreTrainedModel

from rollnest import Batch, Engine, Group, Pause
from rollnest.advantages import GroupKey, for_groups, grpo
from rollnest_adapters.torch import Padded, pad

__all__ = ["Grpo", "Step", "shuffled_rewards", "train"]

_CLIP_LOW, _CLIP_HIGH = 0.2, 0.28
_RAMP = 5


@frozen
class Step:
    """Figures of one training step.

    Attributes:
        groups: Groups with spread in their rewards; the others teach nothing.
        tokens: Tokens trained.
        clipped: Share of them whose ratio was outside the clip range.
        gradient: Norm of the gradient before it is clipped.
    """

    groups: int = 0
    tokens: int = 0
    clipped: float = 0.0
    gradient: float = 0.0


async def train(
    engine: Engine,
    trainer: Grpo,
    *,
    steps: int,
    on_step: Callable[[Batch, Pause, Step], None],
    done: int = 0,
    save: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Trains the engine's policy: batch in, new weights out, again and again.

    One machine shares its cores here, so the policy rests while the trainer works. With cores of its own, the trainer
    would work before the pause, and only the weights move inside.

    Args:
        engine: An engine whose block is open.
        trainer: Makes new weights of batches.
        steps: How many batches, those of an earlier run too.
        on_step: Hears what each step brought.
        done: How many of them an earlier run has trained.
        save: Keeps trainer and engine as they are after a step; called when its batch is committed.

    Cancellation: an optimizer step that has begun is finished first.
    """
    for _ in range(done, steps):
        batch = await engine.next_batch()
        async with engine.paused() as pause:
            step = await anyio.to_thread.run_sync(trainer.step, batch)
            await pause.update_weights(trainer.model.state_dict())
        on_step(batch, pause, step)
        if save is not None:
            engine.commit(batch)
            await save()


class Grpo:
    """Trains a copy of the policy on batches.

    Args:
        policy: The policy to start from; it is copied.
        steps: How many steps there will be; the learning rate falls to a fifth until then.
        rate: Highest learning rate.
        shuffle: Permute the rewards of each batch before training, with this generator: a control, which must not
            learn anything.
        micro_batch: Most rows in one forward pass; `None` is all of them.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        *,
        steps: int,
        rate: float,
        shuffle: random.Random | None = None,
        micro_batch: int | None = None,
    ) -> None:
        self.model: Any = cast("Any", copy.deepcopy(policy)).train()
        self._optimizer: Any = torch.optim.AdamW(
            self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda n: min(1.0, (n + 1) / _RAMP) * (1 - 0.8 * n / steps)
        )
        self._shuffle = shuffle
        self._micro_batch = micro_batch

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a step depends on, as `torch.save` takes it."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "shuffle": None if self._shuffle is None else _state_of(self._shuffle),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        if self._shuffle is not None:
            version, internal, gauss = json.loads(state["shuffle"])
            self._shuffle.setstate((version, tuple(internal), gauss))

    def step(self, batch: Batch) -> Step:
        """Does one optimizer step on a batch."""
        advantages = self._advantages(batch)
        useful = [group for group in batch.groups if any(advantages[group.task, group.visit])]
        if not useful:
            return Step()
        rows = pad(useful, advantages)
        tokens = int(rows.mask.sum())
        clipped = 0.0
        size = self._micro_batch or len(rows.rows)
        for start in range(0, len(rows.rows), size):
            loss, outside = self._loss(rows, slice(start, start + size))
            cast("Any", loss / tokens).backward()
            clipped += float(outside)
        gradient = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        return Step(len(useful), tokens, clipped / tokens, float(gradient))

    def _advantages(self, batch: Batch) -> Mapping[GroupKey, Sequence[float]]:
        if self._shuffle is None:
            return for_groups(batch.groups, grpo)
        return shuffled_rewards(batch.groups, self._shuffle)

    def _loss(self, rows: Padded, part: slice) -> tuple[Tensor, Tensor]:
        """The loss of some rows and how many of their tokens are outside the clip range, both summed over tokens."""
        logits = self.model(
            input_ids=rows.input_ids[part],
            attention_mask=rows.attention_mask[part],
            position_ids=rows.position_ids[part],
        ).logits
        mask = rows.mask[part]
        labels, advantages = rows.labels[part][mask], rows.advantages[part][mask]
        logprobs = logits[mask].float().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        ratio = (logprobs - rows.logprobs[part][mask]).exp()
        clipped = ratio.clamp(1 - _CLIP_LOW, 1 + _CLIP_HIGH)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
        return loss, (ratio != clipped).sum()


def _state_of(generator: random.Random) -> str:
    return json.dumps(generator.getstate())


def shuffled_rewards(
    groups: Sequence[Group], generator: random.Random
) -> Mapping[GroupKey, Sequence[float]]:
    """Returns advantages of the same rewards, dealt out again over the whole batch."""
    rewards = [reward for group in groups for reward in group.rewards]
    generator.shuffle(rewards)
    dealt = iter(rewards)
    return {(g.task, g.visit): grpo([next(dealt) for _ in g.samples]) for g in groups}
