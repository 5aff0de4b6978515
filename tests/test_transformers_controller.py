"""What is the transformers controller's own: options, weights, faults, statistics, what it leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from rollnest import Attempt, Sampling
from rollnest.abc import FinishReason
from rollnest.errors import InferenceError, UnsupportedSampling, WeightsState, WeightUpdateFailed
from rollnest_adapters._cb_manager import Generation
from rollnest_adapters._cb_memory import Freed
from rollnest_adapters.transformers import TransformersController
from tests.tiny_llama import Brake, tiny_llama
from tests.tiny_llama import small_torch as small_torch

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("small_torch")]

HANG = 60.0


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: Any) -> Any:
    return request.param


def controller(model: Any = None, **options: Any) -> TransformersController:
    model = tiny_llama() if model is None else model
    return TransformersController(model, **{"page_size": 8, "num_blocks": 256, **options})


def an_attempt(*prompt: int, max_tokens: int = 16, **sampling: Any) -> Attempt:
    options = Sampling(max_tokens, **sampling)
    return Attempt(prompt or (1, 2, 3), max_tokens=max_tokens, sampling=options)


async def greedy(policy: TransformersController, *prompt: int) -> list[int]:
    one = an_attempt(*prompt, temperature=0.0)
    await policy.generate(one)
    return one.received.ids.tolist()


def count_rows(model: Any) -> list[int]:
    """Returns a list that gets the number of sequences in each forward pass that bring a token."""
    rows: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: rows.append(len(kwargs["logits_indices"])), with_kwargs=True
    )
    return rows


# Options


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_context": 129}, ValueError, "max_context must be <= the model's 128, got 129"),
        ({"max_context": 1}, ValueError, "max_context must be >= 2, got 1"),
        ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_k": 0}, ValueError, "top_k must be >= 1, got 0"),
        ({"vary": ["min_p"]}, ValueError, "vary names 'min_p'"),
        ({"num_blocks": 3}, ValueError, "one whole context of 128 tokens, got 3 blocks"),
        ({"page_size": "32"}, TypeError, "page_size must be an int, got '32'"),
        ({"stop_token_ids": [64]}, ValueError, "stop_token_ids holds 64, the vocabulary is 64"),
        ({"exit_grace": 0}, ValueError, "exit_grace must be > 0"),
        ({"max_requests": 0}, ValueError, "max_requests must be >= 1, got 0"),
    ],
)
def test_bad_options_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        controller(**options)


def test_a_model_that_cannot_generate_is_refused() -> None:
    with pytest.raises(TypeError, match="model must be a transformers model, got Linear"):
        controller(torch.nn.Linear(2, 2))
    headless = LlamaModel(LlamaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64))
    with pytest.raises(ValueError, match="causal language model, got LlamaModel"):
        controller(headless)


def test_stop_ids_come_from_the_model_unless_given() -> None:
    model = tiny_llama(eos_token_id=[5, 9])
    assert controller(model).capabilities.stop_token_ids == {5, 9}
    assert controller(model, stop_token_ids=[7]).capabilities.stop_token_ids == {7}
    assert controller(tiny_llama()).capabilities.stop_token_ids == frozenset()


def test_capabilities_say_what_attempts_may_set() -> None:
    known = controller(top_k=8, vary=["top_p"], max_context=100).capabilities
    assert known.sampling == {"temperature", "stop_token_ids", "top_p"}
    assert known.fixed == {"top_k": 8}
    assert (known.max_context, known.vocab_size) == (100, 64)


@pytest.mark.parametrize(
    "sampling",
    [{"min_tokens": 2}, {"min_p": 0.1}, {"stop": "x"}, {"seed": 3}, {"top_k": 5}, {"top_p": 0.9}],
)
async def test_sampling_that_is_not_honoured_is_refused(sampling: dict[str, Any]) -> None:
    name = next(iter(sampling))
    async with controller() as policy:
        with pytest.raises(UnsupportedSampling, match=name):
            await policy.generate(an_attempt(**sampling))
        assert policy.open_requests == ()
    async with controller(top_k=5) as policy:
        if name == "top_k":
            await policy.generate(an_attempt(**sampling))
        else:
            with pytest.raises(UnsupportedSampling):
                await policy.generate(an_attempt(top_k=5, **sampling))


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (Attempt([], max_tokens=4, sampling=Sampling(4)), "the prompt is empty"),
        (an_attempt(3, 64), "prompt id 64 is outside the vocabulary of 64"),
        (an_attempt(*[1] * 120), "120 prompt tokens and max_tokens 16 do not fit"),
    ],
)
async def test_bad_prompts_fail_alone(one: Attempt, message: str) -> None:
    async with controller() as policy:
        with pytest.raises(InferenceError, match=message) as caught:
            await policy.generate(one)
        assert not caught.value.maybe_executed
        await greedy(policy)


async def test_the_whole_context_can_be_used() -> None:
    one = an_attempt(*[1] * 100, max_tokens=28)
    async with controller() as policy:
        await policy.generate(one)
    assert len(one.received) == 28


# Statistics, and what is left behind


async def test_tokens_committed_are_what_attempts_recorded() -> None:
    many = [an_attempt(i, max_tokens=i) for i in range(1, 20)]
    async with controller() as policy:
        async with anyio.create_task_group() as tasks:
            for one in many:
                tasks.start_soon(policy.generate, one)
        assert policy.tokens_committed == sum(len(one.received) for one in many) == 190
        assert policy.tokens_late == 0
        assert "v0: 0 open, 190 tokens committed, 0 late, running" in repr(policy)
        await policy.pause()
        assert "paused" in repr(policy)
    assert "closed" in repr(policy)


async def test_bug_038_one_request_for_each_attempt() -> None:
    model = tiny_llama()
    model.generation_config.num_return_sequences = 3
    rows = count_rows(model)
    async with controller(model) as policy, anyio.create_task_group() as tasks:
        for i in range(6):
            tasks.start_soon(policy.generate, an_attempt(i + 1, max_tokens=2))
    assert sum(rows) == 12


async def test_nothing_is_left_behind() -> None:
    model = tiny_llama()
    model.set_attn_implementation("sdpa")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    async with controller(model) as policy:
        assert torch.equal(torch.get_rng_state(), state)
        await greedy(policy)
        await policy.pause()
    assert model.config._attn_implementation == "sdpa"
    assert not [t for t in threading.enumerate() if "generation" in t.name or "pause" in t.name]
    async with policy:  # a new loop, the same policy
        assert len(await greedy(policy)) == 16
    with pytest.raises(InferenceError, match="not open"):
        await policy.generate(an_attempt())
    with pytest.raises(InferenceError, match="not open"):
        await policy.pause()


async def test_entering_twice_is_refused() -> None:
    async with controller() as policy:
        with pytest.raises(RuntimeError, match="open already"):
            await policy.__aenter__()
        await greedy(policy)


async def test_the_same_seed_gives_the_same_samples() -> None:
    found: list[list[int]] = []
    with torch.random.fork_rng(devices=[]):
        for seed in (3, 3, 4):
            async with controller(seed=seed) as policy:
                one = an_attempt()
                await policy.generate(one)
            found.append(one.received.ids.tolist())
    assert found[0] == found[1] != found[2]


async def test_the_model_can_be_used_from_outside_meanwhile() -> None:
    model = tiny_llama()
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        async with controller(model) as policy:
            found = model(ids, attention_mask=mask).logits
            await greedy(policy)
    assert torch.allclose(found, expected, atol=1e-5)


async def test_an_attempt_in_flight_is_not_taken_twice() -> None:
    async with controller() as policy, anyio.create_task_group() as tasks:
        await policy.pause()
        one = an_attempt()
        tasks.start_soon(policy.generate, one)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(InferenceError, match="in flight already"):
            await policy.generate(one)
        await policy.resume()
    assert one.finish_reason is FinishReason.LENGTH


async def test_a_forward_pass_that_does_not_end_is_named_and_left() -> None:
    model = tiny_llama()
    brake = Brake(model)
    policy = controller(model, exit_grace=0.01)

    async def enter_and_leave(stall: Brake) -> None:
        async with anyio.create_task_group() as tasks, policy:
            tasks.start_soon(policy.generate, an_attempt())
            await stall.reached()

    with anyio.fail_after(HANG):
        async with brake.stall(after=1) as stall:
            with pytest.warns(ResourceWarning, match="did not end within 0.01 s"):
                await enter_and_leave(stall)
        # The loop's own thread ends as soon as it can.
        for thread in threading.enumerate():
            if "_run_generation_loop" in thread.name:
                await anyio.to_thread.run_sync(thread.join)


# Faults


async def test_bug_088_the_loops_death_reaches_every_generate() -> None:
    model = tiny_llama()
    brake = Brake(model)
    died = RuntimeError("out of everything")

    def die(*_: Any) -> None:
        raise died

    errors: list[InferenceError] = []

    async def generate(policy: TransformersController, *prompt: int) -> None:
        with pytest.raises(InferenceError, match="out of everything") as caught:
            await policy.generate(an_attempt(*prompt))
        errors.append(caught.value)

    with anyio.fail_after(HANG):
        async with controller(model) as policy:
            async with anyio.create_task_group() as tasks, brake.stall(after=2) as stall:
                for i in range(4):
                    tasks.start_soon(generate, policy, i + 1)
                await stall.reached()
                model.register_forward_hook(die)
            assert len(errors) == 4
            assert policy.open_requests == ()
            await generate(policy, 1)  # at once, from now on
            assert errors[-1].__cause__ is died
            with pytest.raises(InferenceError, match="could not pause"):
                await policy.pause()
            await policy.resume()
            assert "failed: the generation loop died" in repr(policy)


async def test_bug_092_a_request_that_is_cut_before_it_began_never_runs() -> None:
    model = tiny_llama()
    rows = count_rows(model)
    with anyio.fail_after(HANG):
        async with controller(model) as policy, anyio.create_task_group() as tasks:
            await policy.pause()
            one, other = an_attempt(), an_attempt()
            tasks.start_soon(policy.generate, one)
            await anyio.wait_all_tasks_blocked()
            with anyio.move_on_after(0):
                await policy.generate(other)
            await policy.abort([one.id])
            await policy.resume()
            await greedy(policy)
    assert one.finish_reason is FinishReason.ABORT
    assert sum(rows) == 16


async def test_bug_092_a_cancellation_that_transformers_loses_still_ends_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It is lost if it gets between the loop's look at new requests and its look at cancellations.
    model = tiny_llama()
    brake = Brake(model)
    with anyio.fail_after(HANG):
        async with controller(model) as policy:
            assert policy._manager is not None
            monkeypatch.setattr(policy._manager, "cancel_request", lambda request_id: None)
            async with brake.stall(after=3) as stall, anyio.create_task_group() as tasks:
                tasks.start_soon(policy.generate, an_attempt(max_tokens=100))
                await stall.reached()
                tasks.cancel_scope.cancel()
            passes = brake.passes
            await greedy(policy)
            assert brake.passes <= passes + 17
            assert policy.tokens_late == 1
            assert not policy._manager.batch_processor.scheduler.active_requests


async def test_requests_start_again_when_all_that_an_eviction_favoured_were_cancelled() -> None:
    one = an_attempt()
    with anyio.fail_after(HANG):
        async with controller() as policy, anyio.create_task_group() as tasks:
            await policy.pause()
            assert policy._manager is not None
            policy._manager.batch_processor.scheduler.block_new_requests = True
            tasks.start_soon(policy.generate, one)
            await policy.resume()
    assert one.finish_reason is FinishReason.LENGTH


# Weights


@pytest.mark.parametrize("attention", ["paged|eager", "eager", "sdpa"])
async def test_answers_do_not_depend_on_the_attention(attention: str) -> None:
    # "paged|eager" is transformers' own; for the others the controller brings its own on a CPU.
    async with controller() as policy:
        expected = [await greedy(policy, 1, 2), await greedy(policy, *range(1, 40))]
    model = tiny_llama()
    model.set_attn_implementation(attention)
    async with controller(model) as policy:
        assert [await greedy(policy, 1, 2), await greedy(policy, *range(1, 40))] == expected
    assert model.config._attn_implementation == attention


async def test_a_pause_that_was_taken_back_leaves_no_thread() -> None:
    model = tiny_llama()
    brake = Brake(model)
    with anyio.fail_after(HANG):
        async with controller(model) as policy, anyio.create_task_group() as tasks:
            async with brake.stall(after=2) as stall:
                tasks.start_soon(policy.generate, an_attempt())
                await stall.reached()
                with anyio.move_on_after(0):
                    await policy.pause()
                assert "running" in repr(policy)
            await policy.pause()
            await policy.resume()
    assert not [t for t in threading.enumerate() if "pause" in t.name]


def changed(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(weights: dict[str, Any]) -> dict[str, Any]:
        return {**weights, **{name.replace("__", "."): value for name, value in changes.items()}}

    return change


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {k: v for k, v in weights.items() if k != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.norm.weight"), "'model.norm.weight' is missing"),
        (
            changed(model__norm__weight=torch.zeros(31)),
            r"'model.norm.weight' has the shape \(31,\)",
        ),
        (changed(another=torch.zeros(1)), "'another' is not in the model"),
        (changed(model__norm__weight=[0.0]), "'model.norm.weight' is a list, not a tensor"),
        (changed(model__norm__weight=torch.zeros(32, device="meta")), "has no values"),
    ],
)
async def test_a_bad_state_dict_leaves_the_old_weights_whole(change: Any, message: str) -> None:
    model = tiny_llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    async with controller(model) as policy:
        expected = await greedy(policy)
        await policy.pause()
        with pytest.raises(WeightUpdateFailed, match=message) as caught:
            await policy.update_weights(change(tiny_llama(seed=1).state_dict()), 1)
        await policy.resume()
        assert caught.value.weights is WeightsState.OLD
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
        assert await policy.version() == 0
        assert await greedy(policy) == expected


async def test_tied_weights_need_one_name_and_must_not_differ() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    new = tiny_llama(seed=1, tie_word_embeddings=True)
    async with controller(model) as policy:
        await policy.pause()
        weights = {k: v.clone() for k, v in new.state_dict().items()}
        await policy.update_weights(without("lm_head.weight")(weights), 1)
        assert torch.equal(model.lm_head.weight, new.lm_head.weight)
        await policy.update_weights(weights, 2)
        weights["lm_head.weight"] += 1
        with pytest.raises(WeightUpdateFailed, match="one tensor in the model, but differ"):
            await policy.update_weights(weights, 3)
        assert await policy.version() == 2


async def test_weights_from_a_directory(tmp_path: Path) -> None:
    new = tiny_llama(seed=1)
    new.save_pretrained(tmp_path / "whole")
    new.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    async with controller(new) as policy:
        expected = await greedy(policy)
    for name in ("whole", "shards"):
        async with controller() as policy:
            await policy.pause()
            await policy.update_weights(tmp_path / name, 4)
            await policy.resume()
            assert await policy.version() == 4
            assert await greedy(policy) == expected


async def test_a_bad_directory_leaves_the_old_weights(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no weights")
    async with controller() as policy:
        await policy.pause()
        for name, message in (("broken", "can't be read"), ("none", "no .safetensors file")):
            with pytest.raises(WeightUpdateFailed, match=message) as caught:
                await policy.update_weights(str(tmp_path / name), 1)
            assert caught.value.weights is WeightsState.OLD
        assert await policy.version() == 0


async def test_a_callable_changes_the_weights_itself() -> None:
    model, new = tiny_llama(), tiny_llama(seed=1)
    async with controller(new) as policy:
        expected = await greedy(policy)

    async def move() -> None:
        model.load_state_dict(new.state_dict())

    async with controller(model) as policy:
        await policy.pause()
        await policy.update_weights(move, 1)
        await policy.resume()
        assert await greedy(policy) == expected


async def test_a_callable_that_fails_leaves_unknown_weights_until_the_next_update() -> None:
    model = tiny_llama()

    async def fail() -> None:
        raise OSError("link down")

    async with controller(model) as policy:
        await policy.pause()
        with pytest.raises(WeightUpdateFailed, match="link down") as caught:
            await policy.update_weights(fail, 1)
        assert caught.value.weights is WeightsState.UNKNOWN
        with pytest.raises(InferenceError, match="link down"):
            await policy.generate(an_attempt())
        await policy.update_weights(tiny_llama(seed=1).state_dict(), 1)
        await policy.resume()
        assert len(await greedy(policy)) == 16


async def test_a_cancelled_callable_leaves_unknown_weights() -> None:
    async with controller() as policy:
        await policy.pause()
        with anyio.move_on_after(0):
            await policy.update_weights(anyio.sleep_forever, 1)
        with pytest.raises(InferenceError, match="cancelled, so nobody knows"):
            await policy.generate(an_attempt())
        assert await policy.version() == 0


async def test_a_copy_that_fails_half_way_leaves_unknown_weights() -> None:
    model = tiny_llama()

    class Poison(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(func, "__name__", "") == "copy_":
                raise RuntimeError("device lost")
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    weights = dict(tiny_llama(seed=1).state_dict())
    weights["model.norm.weight"] = weights["model.norm.weight"].as_subclass(Poison)
    async with controller(model) as policy:
        await policy.pause()
        with pytest.raises(WeightUpdateFailed, match="device lost") as caught:
            await policy.update_weights(weights, 1)
        assert caught.value.weights is WeightsState.UNKNOWN
        await policy.resume()
        with pytest.raises(InferenceError, match="device lost"):
            await policy.generate(an_attempt())


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio cancels through scopes only
async def test_a_natively_cancelled_copy_is_finished_before_the_loop_goes_on() -> None:
    model, new = tiny_llama(), tiny_llama(seed=1)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(func, "__name__", "") == "copy_":
                begun.set()
                assert go_on.wait(HANG)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    weights = dict(new.state_dict())
    weights["model.norm.weight"] = weights["model.norm.weight"].as_subclass(Slow)
    async with controller(new) as policy:
        expected = await greedy(policy)
    with anyio.fail_after(HANG):
        async with controller(model) as policy:
            await policy.pause()
            update = asyncio.ensure_future(policy.update_weights(weights, 1))
            await anyio.to_thread.run_sync(begun.wait)
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            one = an_attempt(temperature=0.0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(policy.generate, one)
                tasks.start_soon(policy.resume)
                for _ in range(20):  # chances for the loop to do what it should not
                    await anyio.to_thread.run_sync(bool)
                assert len(one.received) == 0
                go_on.set()
            assert await policy.version() == 1
    assert one.received.ids.tolist() == expected
    assert set(one.received.versions) == {1}


def test_bug_092_a_cut_is_not_forgotten_when_the_request_is_requeued() -> None:
    generation = Generation("x", [1], max_tokens=9, stop_token_ids=[5], options={})
    assert 6 not in generation.state._eos_token_ids
    generation.cut()
    generation.state.create_equivalent_initial_request()
    assert 6 in generation.state._eos_token_ids


async def test_versions_never_go_back() -> None:
    async with controller(version=5) as policy:
        assert await policy.version() == 5
        await policy.pause()
        with pytest.raises(WeightUpdateFailed, match="version must be >= the present 5, got 4"):
            await policy.update_weights(tiny_llama().state_dict(), 4)


# Memory


async def test_the_caches_memory_is_given_back_and_taken_again() -> None:
    async with controller() as policy:
        before = await greedy(policy, 1, 2, 3)
        assert policy._manager is not None
        (cache,) = policy._manager.cache_tensors
        size = cache.untyped_storage().nbytes()
        assert size > 0
        await policy.pause()
        await policy.release(["kv"])
        assert cache.untyped_storage().nbytes() == 0
        assert "released: kv" in repr(policy)
        await policy.reload(["kv"])
        assert cache.untyped_storage().nbytes() == size
        await policy.resume()
        assert await greedy(policy, 1, 2, 3) == before


def test_freed_tensors_come_back_as_they_were() -> None:
    model = tiny_llama()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    freed = Freed(model.state_dict(keep_vars=True).values(), keep=True)
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    freed.restore()
    freed.restore()
    assert repr(freed) == "<Freed 0 bytes>"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def test_views_of_one_storage_are_freed_once() -> None:
    whole = torch.arange(8.0)
    parts = [whole[:4], whole[4:], whole]
    freed = Freed(parts, keep=True)
    assert repr(freed) == "<Freed 32 bytes>"
    freed.restore()
    assert parts[1].tolist() == [4.0, 5.0, 6.0, 7.0]
    Freed(parts, keep=False).restore()
    assert whole.tolist() == [0.0] * 8


def test_releasable_is_a_bool() -> None:
    assert controller(releasable=False).capabilities.release_tags == frozenset()
    with pytest.raises(TypeError, match="releasable"):
        controller(releasable="kv")
