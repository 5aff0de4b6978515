"""transformers' continuous batching, with the hooks that an event loop needs.

Everything that reaches into transformers' internals is here and in `_cb_attention`; written against 5.24. What is
changed, and why:

- A request is our own `RequestState`. So tokens can be read at any moment, without streaming: streaming copies the
  whole answer for every token. Only finished requests are delivered, one call for each forward pass.
- A cut request ends with the next token it samples, whatever else happens. transformers forgets a cancellation that
  overtakes its request in the two queues, and such a request would run to its end.
- An eviction blocks new requests until some request *finishes*. When those that could were cancelled, transformers
  would never start another; it is unblocked once nothing is active.
- The end of the loop is told, whatever ended it; transformers records it and tells nobody.
- `requeue_all` computes the requests in flight anew, so that no key or value of older weights is used.

Threads: the manager's loop thread appends to token lists; any thread may read them.
"""

# Internals are the point of this module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from . import _cb_attention


class Generation:
    """One request at the manager.

    Attributes:
        id: The request's id.
        error: Why it failed, once it was delivered as failed.
        taken: How many tokens had been read when it was cut; `None` while it is wanted.
    """

    __slots__ = ("error", "id", "state", "taken")

    def __init__(
        self,
        id: str,  # noqa: A002 - the word of the records
        prompt_ids: list[int],
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        options: dict[str, Any],
    ) -> None:
        self.id = id
        self.error: str | None = None
        self.taken: int | None = None
        self.state = _State(
            request_id=id,
            initial_tokens=prompt_ids,
            max_new_tokens=max_tokens,
            eos_token_id=list(stop_token_ids),
            logit_processor_kwargs=options,
        )
        self.state.generation = self

    def read(self) -> tuple[list[int], list[float]]:
        """Returns ids and logprobs of the tokens so far, aligned; from any thread.

        The loop appends a token's id, then its logprob. Both lists only grow, so their common length is aligned.
        """
        state = self.state
        ids = state.generated_tokens[:]
        if (
            state._true_initial_tokens
        ):  # requeued: its prompt is the request's prompt and what it had sampled
            ids = state.initial_tokens[state._true_initial_tokens :] + ids
        logprobs = state.logprobs[:]
        count = min(len(ids), len(logprobs))
        return ids[:count], logprobs[:count]

    def cut(self) -> tuple[list[int], list[float]]:
        """Lets the next token be the last, and returns what there is."""
        self.taken = -1
        self.state._eos_token_ids = _EVERY_TOKEN
        ids, logprobs = self.read()
        self.taken = len(ids)
        return ids, logprobs

    @property
    def late(self) -> int:
        """How many tokens it sampled after it was cut."""
        return 0 if self.taken is None else max(0, len(self.read()[0]) - self.taken)


class Manager(ContinuousBatchingManager):
    """The generation loop, in its own thread.

    `delivered` and `ended` are called in that thread (`delivered` with the requests that finished in one forward
    pass) and must not block. Who made it closes it with `close`.
    """

    background_thread_status: BackgroundThreadStatus
    batch_processor: Any
    model: Any

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        config: ContinuousBatchingConfig,
        *,
        delivered: Callable[[list[Generation]], None],
        ended: Callable[[], None],
    ) -> None:
        self._ended = ended
        with torch.no_grad():
            # Not through `init_continuous_batching`: it hands out a cached manager of other settings if there is one.
            super().__init__(model, generation_config, config)
        self.output_router = _Router(delivered)

    @property
    def fatal_error(self) -> Exception | None:
        """What killed the loop."""
        return self.background_thread_status.fatal_error

    def submit(self, generation: Generation) -> None:
        """Queues a request; never blocks."""
        self.input_queue.put_nowait(generation.state)
        self._wake_up_loop.set()

    def close(self) -> None:
        """Stops the loop after its present forward pass and waits for its thread. Blocks; not inside a pause."""
        if self._generation_thread is not None:
            self.background_thread_status.request_stop(
                BackgroundThreadStatus.HARD_STOP, self.distributed_helper.global_rank
            )
            self._wake_up_loop.set()  # or it sleeps on for a tenth of a second
            self.stop(block=True, hard_stop=True)
        elif (
            self._original_attn_impl is not None
        ):  # never started, so `stop` would leave this as it is
            self.model.set_attn_implementation(self._original_attn_impl)
            self._original_attn_impl = None
        self.destroy()

    @property
    def cache_tensors(self) -> list[Any]:
        """What holds the keys and values; its parts are views of it."""
        processor = self.batch_processor
        return [] if processor is None else [processor.cache.cache_tensor]

    def requeue_all(self) -> None:
        """Frees the cache; requests in flight are prefilled anew, prompt and partial. Only inside a pause."""
        processor = self.batch_processor
        if processor is None:
            return
        scheduler = processor.scheduler
        for state in list(scheduler.active_requests.values()):
            fresh = state.create_equivalent_initial_request()
            state._status = RequestStatus.FINISHED
            scheduler.finish_request(state.request_id)
            scheduler.add_waiting_request(fresh)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        if _cb_attention.fits(model):
            _cb_attention.register()
            self._original_attn_impl = model.config._attn_implementation
            model.set_attn_implementation(_cb_attention.NAME)
        else:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)

    def _create_batch_processor(self) -> Any:
        processor: Any = super()._create_batch_processor()
        if self.model.config._attn_implementation == _cb_attention.NAME:
            _cb_attention.take_over(processor.cache)
        return processor

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        scheduler = batch_processor.scheduler
        if scheduler.block_new_requests and not scheduler.active_requests:
            scheduler.block_new_requests = False
        return super()._generation_loop_body(batch_processor, bootstrapping)

    def _run_generation_loop(self, use_inference_mode: bool) -> None:
        _cb_attention.enter_loop()
        try:
            super()._run_generation_loop(use_inference_mode)
        finally:
            self._ended()


class _EveryToken(Container[int]):
    def __contains__(self, _: object) -> bool:
        return True


_EVERY_TOKEN: Any = _EveryToken()


class _State(RequestState):
    """A request's state that knows its `Generation`, and is its own output."""

    generation: Generation

    def to_generation_output(self) -> Any:
        return self  # nothing is copied: whoever wants the tokens reads them once

    def create_equivalent_initial_request(self) -> _State:
        state = _State.__new__(_State)
        state.__dict__.update(super().create_equivalent_initial_request().__dict__)
        state.generation = self.generation
        self.generation.state = state
        # After the line above, so that `cut` either finds the new state or is seen here.
        if self.generation.taken is not None:
            state._eos_token_ids = _EVERY_TOKEN
        return state


class _Router(OutputRouter):
    """Passes on what finished; there is no table of handlers that could leak."""

    def __init__(self, delivered: Callable[[list[Generation]], None]) -> None:
        super().__init__()
        self._delivered = delivered

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        for state in outputs:
            if state.status == RequestStatus.FAILED:
                state.generation.error = state.error or "it failed"
        self._delivered([state.generation for state in outputs])
