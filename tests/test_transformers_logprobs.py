"""Logprobs and versions tell the truth: each token's logprob is what the model of its version gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
import torch

from rollnest import Attempt, PauseMode, Sampling
from rollnest.abc import FinishReason
from rollnest_adapters.transformers import TransformersController
from tests.tiny_llama import Brake, tiny_llama
from tests.tiny_llama import small_torch as small_torch

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("small_torch")]

TOLERANCE = 1e-3
MAX_TOKENS = 24
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13], list(range(20, 60))]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: Any) -> Any:
    return request.param


def controller(model: Any, **options: Any) -> TransformersController:
    return TransformersController(model, page_size=8, num_blocks=256, **options)


def sampled(prompt: Sequence[int], *, version: int = 0, **sampling: Any) -> Attempt:
    options = Sampling(MAX_TOKENS, **sampling)
    return Attempt(prompt, max_tokens=MAX_TOKENS, sampling=options, version=version)


@torch.no_grad()
def full_pass(
    model: Any,
    prompt: Sequence[int],
    ids: Sequence[int],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
) -> Any:
    """Returns each token's logprob by one forward pass over everything."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort()
        out = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        out[:, -1] = False
        logits = logits.masked_fill(out.scatter(-1, order, out), -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(list(ids))[:, None]).squeeze(1)


def tells_the_truth(
    one: Attempt, models: dict[int, Any], prompt: Sequence[int] | None = None, **options: Any
) -> bool:
    """Whether each token's logprob is what `models[its version]` gives it."""
    received = one.received
    prompt = prompt or one.prompt_ids.tolist()
    given = torch.tensor(received.logprobs.tolist())
    return all(
        torch.allclose(
            full_pass(models[version], prompt, received.ids.tolist(), **options)[start:stop],
            given[start:stop],
            rtol=0,
            atol=TOLERANCE,
        )
        for version, start, stop in received.version_runs
    )


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.7])
async def test_logprobs_agree_with_a_full_pass(temperature: float) -> None:
    model = tiny_llama()
    many = [sampled(prompt, temperature=temperature) for prompt in PROMPTS]
    async with controller(model) as policy, anyio.create_task_group() as tasks:
        for one in many:
            tasks.start_soon(policy.generate, one)
    assert all(len(one.received) == MAX_TOKENS for one in many)
    for one in many:
        assert tells_the_truth(one, {0: model}, temperature=temperature)
        assert not tells_the_truth(one, {0: model}, temperature=temperature * 1.2)


async def test_logprobs_agree_when_temperatures_differ_from_attempt_to_attempt() -> None:
    model = tiny_llama()
    many = {t: sampled(PROMPTS[1], temperature=t) for t in (0.5, 1.0, 1.5)}
    async with controller(model) as policy, anyio.create_task_group() as tasks:
        for one in many.values():
            tasks.start_soon(policy.generate, one)
    for temperature, one in many.items():
        assert tells_the_truth(one, {0: model}, temperature=temperature)


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.7}])
@pytest.mark.parametrize("how", ["fixed", "varied"])
async def test_logprobs_are_of_the_filtered_distribution(filters: dict[str, Any], how: str) -> None:
    model = tiny_llama()
    options = filters if how == "fixed" else {"vary": list(filters)}
    one = sampled(PROMPTS[0], temperature=0.9, **filters)
    async with controller(model, **options) as policy:
        await policy.generate(one)
    assert tells_the_truth(one, {0: model}, temperature=0.9, **filters)
    assert not tells_the_truth(one, {0: model}, temperature=0.9)


async def test_logprobs_agree_when_prompts_are_prefilled_in_parts_and_batches_are_full() -> None:
    model = tiny_llama()
    many = [sampled(PROMPTS[i % 5]) for i in range(12)]
    async with (
        controller(model, max_requests=5, max_batch_tokens=16) as policy,
        anyio.create_task_group() as tasks,
    ):
        for one in many:
            tasks.start_soon(policy.generate, one)
    assert all(tells_the_truth(one, {0: model}) for one in many)


async def test_logprobs_agree_when_the_cache_is_too_small_for_all() -> None:
    # 16 blocks hold one context of 128: requests are evicted and prefilled anew.
    model = tiny_llama()
    many = [sampled(PROMPTS[i % 5]) for i in range(10)]
    async with (
        TransformersController(model, page_size=8, num_blocks=16) as policy,
        anyio.create_task_group() as tasks,
    ):
        for one in many:
            tasks.start_soon(policy.generate, one)
    assert all(one.finish_reason is FinishReason.LENGTH for one in many)
    assert all(len(one.received) == MAX_TOKENS for one in many)
    assert all(tells_the_truth(one, {0: model}) for one in many)


async def test_greedy_logprobs_are_zero_because_the_token_was_certain() -> None:
    one = sampled(PROMPTS[0], temperature=0.0)
    async with controller(tiny_llama()) as policy:
        await policy.generate(one)
    assert set(one.received.logprobs) == {0.0}


async def test_aborted_and_continued_across_an_update_each_token_has_its_version() -> None:
    model, old, new = tiny_llama(), tiny_llama(), tiny_llama(seed=1)
    brake = Brake(model)
    first = [sampled(prompt) for prompt in PROMPTS]
    async with controller(model) as policy:
        async with anyio.create_task_group() as tasks, brake.stall(after=9) as stall:
            for one in first:
                tasks.start_soon(policy.generate, one)
            await stall.reached()
            await policy.abort(None)
        await policy.pause(PauseMode.ABORT)
        await policy.update_weights(new.state_dict(), 1)
        await policy.resume()
        for one in first:
            # As the engine does: prompt and partial, the rest of the budget, one record.
            partial = one.received
            rest = sampled([*one.prompt_ids, *partial.ids], version=1)
            rest.max_tokens = MAX_TOKENS - len(partial)
            await policy.generate(rest)
            partial.append_policy(
                rest.received.ids, rest.received.logprobs, list(rest.received.versions)
            )
    for one in first:
        assert [run[0] for run in one.received.version_runs] == [0, 1]
        assert len(one.received) == MAX_TOKENS
    assert_versions_matter(first, old, new)


async def test_kept_in_flight_across_an_update_each_token_has_its_version() -> None:
    # Stronger than the engine needs: without an abort the request goes on, and its old keys and values are not used.
    model, old, new = tiny_llama(), tiny_llama(), tiny_llama(seed=1)
    brake = Brake(model)
    many = [sampled(prompt) for prompt in PROMPTS]
    async with controller(model) as policy, anyio.create_task_group() as tasks:
        async with brake.stall(after=9) as stall:
            for one in many:
                tasks.start_soon(policy.generate, one)
            await stall.reached()
            async with anyio.create_task_group() as pausing:
                pausing.start_soon(policy.pause)
                await anyio.lowlevel.checkpoint()
                brake.let_go()
        await policy.update_weights(new.state_dict(), 1)
        await policy.update_weights(old.state_dict(), 2)
        await policy.update_weights(new.state_dict(), 3)
        await policy.resume()
    for one in many:
        assert [run[0] for run in one.received.version_runs] == [0, 3]
        assert len(one.received) == MAX_TOKENS
    assert_versions_matter(many, old, new)


def assert_versions_matter(many: list[Attempt], old: Any, new: Any) -> None:
    newest = max(many[0].received.versions)
    for one in many:
        prompt = one.prompt_ids.tolist()
        ids = one.received.ids.tolist()
        difference = full_pass(old, prompt, ids) - full_pass(new, prompt, ids)
        assert difference.abs().mean() > 0.05
        assert tells_the_truth(one, {0: old, newest: new})
        assert not tells_the_truth(one, {0: new, newest: old})
        assert not tells_the_truth(one, {0: old, newest: old})
        assert not tells_the_truth(one, {0: new, newest: new})


async def test_bug_068_no_keys_or_values_of_older_weights_are_used() -> None:
    # The same prompt before and after: had its cache been found again, the first token's logprob would be off.
    model, new = tiny_llama(), tiny_llama(seed=1)
    prompt = list(range(1, 50))
    async with controller(model) as policy:
        await policy.generate(sampled(prompt))
        await policy.pause()
        await policy.update_weights(new.state_dict(), 1)
        await policy.resume()
        after = sampled(prompt, version=1)
        await policy.generate(after)
    assert tells_the_truth(after, {1: new})
