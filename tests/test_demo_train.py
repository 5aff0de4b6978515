"""The demo's trainer: it learns what is rewarded, nothing from shuffled rewards, and sees a `Batch` only."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rollnest import (
    Batch,
    BatchStatistics,
    Group,
    Prompt,
    Response,
    Sample,
    Segment,
    Status,
    Verdict,
)
from rollnest_adapters.demo.policy import new_policy, warm_start
from rollnest_adapters.demo.task import chain_sums
from rollnest_adapters.demo.tokenizer import CharTokenizer
from rollnest_adapters.demo.train import Grpo, Step, shuffled_rewards

GOOD, BAD = [5, 6, 1], [7, 8, 9, 1]
PROMPT = [2, 3, 4]


def fresh() -> Any:
    policy: Any = new_policy(seed=0)
    return policy.eval()


def logprobs(model: Any, answer: Sequence[int]) -> list[float]:
    """The model's logprob of each token of an answer to `PROMPT`."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*PROMPT, *answer]])).logits[0]
    predicted = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    chosen: list[float] = predicted.gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()
    return chosen


def answered(model: Any, answer: Sequence[int], reward: float, *, visit: int, index: int) -> Sample:
    response = Response()
    response.append_policy(answer, logprobs(model, answer), 0)
    prompt_ids = memoryview(array("i", PROMPT)).toreadonly()
    return Sample(
        task="t",
        prompt=Prompt("p", token_ids=PROMPT),
        visit=visit,
        index=index,
        status=Status.COMPLETED,
        segments=(Segment(prompt_ids, response.seal()),),
        verdict=Verdict(reward),
    )


def batch_of(model: Any, *rewards: Sequence[tuple[list[int], float]]) -> Batch:
    groups = [
        Group(
            "t",
            Prompt("p", token_ids=PROMPT),
            visit,
            tuple(
                answered(model, answer, reward, visit=visit, index=index)
                for index, (answer, reward) in enumerate(members)
            ),
        )
        for visit, members in enumerate(rewards)
    ]
    statistics = BatchStatistics(groups=len(groups))
    return Batch(index=1, version=0, groups=tuple(groups), tasks={}, statistics=statistics)


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def test_a_step_favours_what_was_rewarded() -> None:
    policy = fresh()
    batch = batch_of(policy, [(GOOD, 1.0), (BAD, 0.0)])
    trainer = Grpo(policy, steps=10, rate=1e-3)
    step = trainer.step(batch)
    assert step.groups == 1
    assert step.tokens == len(GOOD) + len(BAD)
    assert step.clipped == 0  # the first step's ratio is 1
    assert sum(logprobs(trainer.model, GOOD)) > sum(logprobs(policy, GOOD))
    assert sum(logprobs(trainer.model, BAD)) < sum(logprobs(policy, BAD))


def test_tokens_far_off_the_old_policy_are_clipped() -> None:
    policy = fresh()
    batch = batch_of(policy, [(GOOD, 1.0), (BAD, 0.0)])
    trainer = Grpo(policy, steps=100, rate=1e-2)
    steps = [trainer.step(batch) for _ in range(20)]
    assert steps[-1].clipped > 0.5


def test_the_policy_itself_is_not_touched() -> None:
    policy = fresh()
    before = weights(policy)
    Grpo(policy, steps=10, rate=1e-3).step(batch_of(policy, [(GOOD, 1.0), (BAD, 0.0)]))
    assert torch.equal(weights(policy), before)


def test_groups_without_spread_teach_nothing() -> None:
    policy = fresh()
    trainer = Grpo(policy, steps=10, rate=1e-3)
    assert trainer.step(batch_of(policy, [(GOOD, 1.0), (BAD, 1.0)])) == Step()
    assert torch.equal(weights(trainer.model), weights(policy))


def test_a_rate_of_zero_changes_nothing() -> None:
    policy = fresh()
    trainer = Grpo(policy, steps=10, rate=0.0)
    assert trainer.step(batch_of(policy, [(GOOD, 1.0), (BAD, 0.0)])).gradient > 0
    assert torch.equal(weights(trainer.model), weights(policy))


def test_micro_batches_add_up_to_the_whole() -> None:
    policy = fresh()
    batch = batch_of(policy, [(GOOD, 1.0), (BAD, 0.0)], [(BAD, 1.0), (GOOD, 0.0), (GOOD, 0.0)])
    whole, parts = (Grpo(policy, steps=10, rate=1e-3, micro_batch=size) for size in (None, 2))
    assert whole.step(batch).gradient == pytest.approx(parts.step(batch).gradient, rel=1e-3)


def test_shuffled_rewards_are_the_same_rewards_in_other_places() -> None:
    policy = fresh()
    batch = batch_of(policy, *[[(GOOD, 1.0), (BAD, 0.0)]] * 8)
    plain = Grpo(policy, steps=1, rate=0.0)._advantages(batch)
    shuffled = shuffled_rewards(batch.groups, random.Random(0))
    assert shuffled.keys() == plain.keys()
    assert any(shuffled[key] != plain[key] for key in plain)
    assert all(len(values) == 2 for values in shuffled.values())


def test_the_warm_start_stops_at_its_target_or_its_bound() -> None:
    problems = chain_sums(seed=0, size=2000)
    heard: list[int] = []

    def start(target: float, max_steps: int) -> int:
        return warm_start(
            new_policy(seed=0),
            CharTokenizer(),
            problems.train,
            probe=problems.probe[:8],
            judger=problems.judger,
            target=target,
            max_steps=max_steps,
            seed=0,
            on_step=lambda step, accuracy: heard.append(step),
        )

    assert start(0.0, 50) == 10
    assert start(1.0, 15) == 15
    assert heard == [10, 10]
