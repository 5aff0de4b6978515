"""An in-process policy: a transformers model that generates with continuous batching, on a CPU or on CUDA.

Invariants:

- Every attempt is in `_open` from the moment it is submitted until it has been settled, in one synchronous step.
  What the loop delivers for any other is late: counted, never committed.
- A token's version is the one that the weights had when it was sampled. Weights change only while the loop is parked
  between two forward passes, so at that moment every open attempt's tokens are counted, and that many have the old
  version. Nothing is stamped per token.
- Nothing of older weights is used under newer ones: there is no sharing of cache blocks between requests, and
  requests that are in flight across an update are computed anew from their ids.

The threads: transformers' generation loop (ended when the controller's block is left) and, while paused, one that holds
the pause (ended by `resume`, or when the block is left). The loop's thread hands finished requests to the event loop
itself, once for each forward pass at most; there is no other pump.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Literal

import anyio
import anyio.to_thread
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from rollnest.abc import (
    Attempt,
    Capabilities,
    FinishReason,
    Health,
    PauseMode,
    ReleaseTag,
    SamplingField,
    WeightSource,
)
from rollnest.errors import InferenceError, UnsupportedSampling, WeightsState, WeightUpdateFailed

from . import _cb_weights
from ._cb_manager import Generation, Manager
from ._cb_memory import Freed
from ._loop_bridge import Inbox, loop_caller

__all__ = ["TransformersController"]

_GREEDY = 1e-6
"""Stands for temperature 0: the likeliest token's probability is 1, and the generation loop may divide by it."""

_CPU_CACHE_TOKENS = 65_536


class TransformersController:
    """A transformers model as the policy, in this process.

    Enter it with `async with`, or give it to an `Engine`, which does. It uses the model's own tensors: `update_weights`
    changes the model that was given. Leaving the block ends both threads and attempts in flight, as aborts.

    Temperature and stop ids may differ from attempt to attempt. `top_p` and `top_k` are fixed here, unless named in
    `vary`, because a filter per attempt sorts the vocabulary for every token. Continuous batching has no `min_tokens`,
    `min_p`, `stop` strings or `seed` for single requests; they are refused. Temperature 0 is greedy, with logprobs of
    0.0: the distribution sampled from has one token.

    On a CPU the defaults suit hundreds of short requests at a time: keep `max_requests` as high as what is in flight,
    and `page_size` well below the usual length of prompt and response, because pages are read whole. Weights that give
    NaN kill the generation loop; then everything fails until the controller is entered anew.

    Attributes:
        tokens_committed: Tokens that attempts recorded.
        tokens_late: Tokens that were sampled for attempts that had been aborted, cut or given up.

    Args:
        model: A causal language model. It is put into evaluation mode.
        max_context: Most tokens of prompt and response together; `None` is the model's.
        stop_token_ids: Ids that end a turn by themselves; `None` are the end-of-sequence ids of the model.
        top_p: Nucleus sampling's mass for all attempts; 1 is off.
        top_k: Sample among the k likeliest tokens, for all attempts; `None` is off.
        vary: Which of `top_p` and `top_k` attempts may set themselves.
        max_requests: Most requests in one forward pass; more of them wait.
        max_batch_tokens: Most tokens in one forward pass. Longer prompts are prefilled in parts.
        page_size: Tokens in one block of the cache.
        num_blocks: Blocks of the cache. `None` is room for 65,536 tokens on a CPU (for one whole context at least);
            elsewhere it is as many as fit into what memory is free.
        releasable: Whether its memory can be given back in a pause: the cache's, and on CUDA the weights', which go to
            the host meanwhile. CUDA graphs hold addresses, so they are off then. `None` is where it costs nothing: on
            a CPU. Whoever trains the very model that is given must not release its weights.
        seed: Seeds torch's *global* generator when entered. `None` leaves it alone.
        version: Weight version of the model as given.
        exit_grace: Seconds that the forward pass in progress may take when the block is left.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_context: int | None = None,
        stop_token_ids: Collection[int] | None = None,
        top_p: float = 1.0,
        top_k: int | None = None,
        vary: Collection[Literal["top_p", "top_k"]] = (),
        max_requests: int = 512,
        max_batch_tokens: int = 2048,
        page_size: int = 16,
        num_blocks: int | None = None,
        releasable: bool | None = None,
        seed: int | None = None,
        version: int = 0,
        exit_grace: float = 5.0,
    ) -> None:
        _check_model(model)
        self._model: Any = model
        for name, value, lowest in (
            ("max_requests", max_requests, 1),
            ("max_batch_tokens", max_batch_tokens, 1),
            ("page_size", page_size, 4),
            ("version", version, 0),
        ):
            _check_whole(name, value, lowest)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}")
        if top_k is not None:
            _check_whole("top_k", top_k, 1)
        if unknown := set(vary) - {"top_p", "top_k"}:
            raise ValueError(f"vary names {sorted(unknown)[0]!r}; it may name 'top_p' and 'top_k'")
        if not exit_grace > 0:
            raise ValueError(f"exit_grace must be > 0, got {exit_grace}")
        config = self._model.config.get_text_config()
        on_cpu = self._model.device.type == "cpu"
        if releasable is None:
            releasable = on_cpu
        elif not isinstance(releasable, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"releasable must be a bool or None, got {releasable!r}")
        self._capabilities = Capabilities(
            vocab_size=config.vocab_size,
            max_context=_context(config, max_context),
            logprobs="processed",
            stop_token_ids=_stop_ids(self._model, config.vocab_size, stop_token_ids),
            sampling={"temperature", "stop_token_ids", *vary},
            fixed={
                name: value for name, value in _filters(top_p, top_k).items() if name not in vary
            },
            version_spans=True,
            pause_modes={PauseMode.ABORT, PauseMode.KEEP},
            release_tags={"kv", "weights"} if releasable else (),
        )
        self._vary = frozenset(vary)
        self._generation_config = self._generation(top_p, top_k)
        if num_blocks is None and on_cpu:
            tokens = max(_CPU_CACHE_TOKENS, self._capabilities.max_context + page_size)
            num_blocks = math.ceil(tokens / page_size)
        if num_blocks is not None:
            _check_whole("num_blocks", num_blocks, 1)
            if num_blocks * page_size < self._capabilities.max_context:
                raise ValueError(
                    f"num_blocks must hold one whole context of {self._capabilities.max_context} tokens, "
                    f"got {num_blocks} blocks of page_size {page_size}"
                )
        self._batching = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=num_blocks,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_requests,
            # A shared block outlives its request, and its weights.
            allow_block_sharing=False,
            # With two batches in the air, tokens of the old weights would still arrive after an update.
            use_async_batching=False,
            use_cuda_graph=False if releasable and not on_cpu else None,
            return_logprobs=True,
            per_request_processors=True,
            seed=seed,
        )
        self._exit_grace = exit_grace
        self._version = version
        self._manager: Manager | None = None
        self._inbox: Inbox[Generation | None] | None = None
        self._open: dict[str, _Request] = {}
        self._pause: _PauseHolder | None = None
        self._holders: set[_PauseHolder] = set()
        self._freed: dict[ReleaseTag, Freed] = {}
        self._fault: str | None = None
        self._cause: BaseException | None = None
        self.tokens_committed: int = 0
        self.tokens_late: int = 0

    def __repr__(self) -> str:
        state = "closed" if self._manager is None else "paused" if self._pause else "running"
        if self._freed:
            state = f"released: {', '.join(self._freed)}"
        if self._fault:
            state = f"failed: {self._fault}"
        return (
            f"<TransformersController {type(self._model).__name__} v{self._version}: {len(self._open)} open, "
            f"{self.tokens_committed} tokens committed, {self.tokens_late} late, {state}>"
        )

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._capabilities

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of the attempts in flight, oldest first."""
        return tuple(self._open)

    async def __aenter__(self) -> TransformersController:
        """Builds the cache and starts the generation loop.

        Cancellation: nothing is left running.
        """
        if self._manager is not None:
            raise RuntimeError("the controller is open already")
        self._inbox = inbox = Inbox(self._arrived)
        self._fault = self._cause = None
        manager = Manager(
            self._model,
            self._generation_config,
            self._batching,
            delivered=inbox.put,  # type: ignore[arg-type]  # a list of a narrower item, only read
            ended=lambda: inbox.put([None]),
        )
        try:
            await anyio.to_thread.run_sync(self._warm_up, manager)
        except BaseException:
            manager.close()  # its thread does not run yet, so this does not block
            raise
        manager.start()
        self._manager = manager
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        """Ends attempts in flight as aborts, then both threads.

        Cancellation: shielded for `exit_grace` seconds at most; then a thread that is still in a forward pass is
        named in a warning and left to end by itself.
        """
        manager, self._manager = self._manager, None
        if manager is None:
            return
        self._abort(list(self._open))
        self._pause = None
        with anyio.move_on_after(self._exit_grace, shield=True) as deadline:
            if self._freed:
                # The model is the user's, and the loop may not run without its cache.
                await anyio.to_thread.run_sync(self._restore, tuple(self._freed))
            # Its own pauses first: a parked loop can't end. One that was taken back may still wait for the loop.
            for holder in list(self._holders):
                await holder.release()
            await anyio.to_thread.run_sync(manager.close, abandon_on_cancel=True)
        if deadline.cancelled_caught:
            warnings.warn(
                f"the generation loop of {self!r} did not end within {self._exit_grace} s and was left alone",
                ResourceWarning,
                stacklevel=2,
            )
        elif self._inbox is not None:
            self._inbox.drain()  # what was late is counted

    async def generate(self, attempt: Attempt) -> None:
        """Continues `attempt.prompt_ids`; commits all tokens in one step, when they are complete or cut.

        While paused it waits.

        Cancellation: what was sampled so far is committed, the request ends, and later tokens are only counted.

        Raises:
            InferenceError: The request or the generation loop failed, or the prompt does not fit.
            UnsupportedSampling: The attempt's sampling can't be honoured.
        """
        request = self._submit(attempt)
        try:
            await request.done.wait()
        finally:
            if attempt.id in self._open:  # cancelled: nobody settled it
                self._cut(request, None)
        if request.error is not None:
            raise request.error

    async def abort(self, ids: Collection[str] | None) -> None:
        """Ends attempts at once, with what they have; their `generate` calls return.

        One that is complete, but not settled yet, keeps its own end.

        Cancellation: either all are ended or none.
        """
        await anyio.lowlevel.checkpoint()
        self._abort(list(self._open) if ids is None else [i for i in ids if i in self._open])

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """Returns once the generation loop is parked.

        In either mode attempts in flight stay as they are, and go on after `resume`; what they have keeps its version.

        Cancellation: takes the pause back.

        Raises:
            InferenceError: The generation loop is not running.
        """
        manager = self._running()
        if self._pause is not None:
            await self._pause.parked.wait()
            return
        self._pause = pause = _PauseHolder(manager, self._holders)
        try:
            await pause.parked.wait()
        except BaseException:
            self._pause = None
            pause.let_go()
            raise
        if pause.error is not None:
            self._pause = None
            raise InferenceError(f"could not pause: {pause.error}") from pause.error

    async def resume(self) -> None:
        """Lets the generation loop run again. Idempotent.

        Cancellation: it runs again all the same.

        Raises:
            InferenceError: Something is released; `reload` comes first.
        """
        self._check_not_released("resume")
        pause, self._pause = self._pause, None
        if pause is None:
            await anyio.lowlevel.checkpoint()
        else:
            await pause.release()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Loads new weights in place. Attempts in flight go on with them; what they have keeps its version.

        Args:
            source: A state dict with the model's names and shapes (tied weights need one name), a directory with
                safetensors files of such names, or an async callable that changes the model's tensors itself.
            version: What the weights are called from now on; never less than before.

        Cancellation: a copy that has begun is finished before the loop can run again. A callable that is cancelled
            leaves weights that nobody knows: `generate` raises until an update succeeds.

        Raises:
            WeightUpdateFailed: Says which weights the model holds now.
        """
        self._running()
        pause = self._pause
        if pause is None or not pause.parked.is_set():
            raise WeightUpdateFailed(
                "weights are only updated while paused", weights=WeightsState.OLD
            )
        if "weights" in self._freed:
            raise WeightUpdateFailed(
                "the weights are released; they are reloaded before an update",
                weights=WeightsState.OLD,
            )
        if version < self._version:
            raise WeightUpdateFailed(
                f"version must be >= the present {self._version}, got {version!r}",
                weights=WeightsState.OLD,
            )
        try:
            if callable(source):
                await self._let_update(source, version)
            else:
                await anyio.to_thread.run_sync(pause.during, lambda: self._load(source, version))
        except WeightUpdateFailed as error:
            if error.weights is not WeightsState.OLD:
                self._break(str(error), error)
            raise

    async def release(self, tags: Collection[ReleaseTag]) -> None:
        """Gives the cache's memory back, and on CUDA the weights'. Requests in flight are computed anew afterwards.

        Weights on a CPU stay: they are where they would go.

        Cancellation: what has begun is finished.

        Raises:
            InferenceError: The generation loop is not parked. Nothing is released.
        """
        manager, pause = self._running(), self._pause
        if pause is None or not pause.parked.is_set():
            raise InferenceError("memory is only released while paused")
        wanted: list[ReleaseTag] = [tag for tag in tags if tag not in self._freed]
        if "kv" in wanted:
            manager.requeue_all()
        await anyio.to_thread.run_sync(pause.during, lambda: self._free(manager, wanted))

    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        """Takes the memory again: the weights are as they were, the cache is empty.

        Cancellation: what has begun is finished.
        """
        wanted: list[ReleaseTag] = [tag for tag in tags if tag in self._freed]
        await anyio.to_thread.run_sync(self._restore, wanted)

    async def version(self) -> int:
        """Returns the weight version."""
        await anyio.lowlevel.checkpoint()
        return self._version

    async def health(self) -> Health:
        """Returns how many requests are open; the loop doesn't say which of them wait.

        Raises:
            InferenceError: The generation loop is not running.
        """
        await anyio.lowlevel.checkpoint()
        self._running()
        self._check_fault()
        return Health(running=len(self._open))

    # Building

    def _generation(self, top_p: float, top_k: int | None) -> GenerationConfig:
        # A filter exists in the loop only if the configuration sets it to something; attempts then override that.
        config: Any = GenerationConfig  # not annotated
        made: GenerationConfig = config(
            do_sample=True,
            temperature=0.5,
            top_p=0.5 if "top_p" in self._vary else top_p,
            top_k=self._capabilities.vocab_size if "top_k" in self._vary else top_k or 0,
            eos_token_id=sorted(self._capabilities.stop_token_ids) or -1,
            pad_token_id=0,
        )
        return made

    def _warm_up(self, manager: Manager) -> None:
        # transformers seeds torch's global generator here, with a random seed if it got none.
        device = self._model.device
        with torch.random.fork_rng(  # pyright: ignore[reportUnknownMemberType]
            devices=[device] if device.type == "cuda" else [],
            enabled=self._batching.seed is None,
        ):
            manager.warmup()

    def _running(self) -> Manager:
        if self._manager is None:
            raise InferenceError("the controller is not open", maybe_executed=False)
        return self._manager

    def _check_fault(self) -> None:
        if self._fault is not None:
            raise InferenceError(self._fault, maybe_executed=False) from self._cause

    # Requests; everything here is synchronous and on the event loop

    def _submit(self, attempt: Attempt) -> _Request:
        manager = self._running()
        self._check_fault()
        self._check_not_released("generate")
        if attempt.id in self._open:
            raise InferenceError(f"attempt {attempt.id} is in flight already", maybe_executed=False)
        options = self._options(attempt)
        prompt_ids = attempt.prompt_ids.tolist()
        known = self._capabilities
        if not prompt_ids:
            raise InferenceError("the prompt is empty", maybe_executed=False)
        if len(prompt_ids) + attempt.max_tokens > known.max_context:
            raise InferenceError(
                f"{len(prompt_ids)} prompt tokens and max_tokens {attempt.max_tokens} "
                f"do not fit into the context of {known.max_context}",
                maybe_executed=False,
            )
        if max(prompt_ids) >= known.vocab_size:
            # An id past the embedding would kill the loop, and every other request with it.
            raise InferenceError(
                f"prompt id {max(prompt_ids)} is outside the vocabulary of {known.vocab_size}",
                maybe_executed=False,
            )
        stop = known.stop_token_ids.union(attempt.sampling.stop_token_ids)
        request = _Request(
            attempt,
            Generation(
                attempt.id,
                prompt_ids,
                max_tokens=attempt.max_tokens,
                stop_token_ids=sorted(stop),
                options=options,
            ),
            stop,
        )
        self._open[attempt.id] = request
        manager.submit(request.generation)
        return request

    def _options(self, attempt: Attempt) -> dict[str, Any]:
        sampling, known = attempt.sampling, self._capabilities
        absent: dict[SamplingField, Any] = {
            "min_tokens": 0,
            "min_p": None,
            "stop": (),
            "seed": None,
            **known.fixed,
        }
        for name, value in absent.items():
            if getattr(sampling, name) != value:
                raise UnsupportedSampling(
                    f"{name}={getattr(sampling, name)!r} can't be honoured by continuous batching; "
                    f"here it is {value!r} for all attempts"
                )
        options: dict[str, Any] = {"temperature": float(sampling.temperature or _GREEDY)}
        if "top_p" in self._vary:
            options["top_p"] = float(sampling.top_p)
        if "top_k" in self._vary:
            options["top_k"] = sampling.top_k or known.vocab_size
        return options

    def _arrived(self, generations: list[Generation | None]) -> None:
        for generation in generations:
            if generation is None:
                self._loop_ended()
            elif (
                request := self._open.get(generation.id)
            ) is None or request.generation is not generation:
                self.tokens_late += generation.late
            elif generation.error is not None:
                self._settle(request, *generation.read(), None)
                request.error = InferenceError(
                    f"the generation loop failed the request: {generation.error}"
                )
            else:
                self._settle(request, *generation.read(), FinishReason.ABORT)

    def _abort(self, ids: list[str]) -> None:
        for i in ids:
            self._cut(self._open[i], FinishReason.ABORT)

    def _cut(self, request: _Request, reason: FinishReason | None) -> None:
        """Ends a request here and now; the loop hears of it with its next forward pass."""
        tokens = request.generation.cut()
        if self._manager is not None:
            self._manager.cancel_request(request.attempt.id)
        self._settle(request, *tokens, reason)

    def _settle(
        self,
        request: _Request,
        ids: list[int],
        logprobs: list[float],
        reason: FinishReason | None,
    ) -> None:
        """Commits what there is, finishes the attempt (`None`: leaves it unfinished) and wakes its `generate`."""
        attempt = request.attempt
        del self._open[attempt.id]
        request.done.set()
        try:
            recorded = attempt.commit(ids, logprobs, request.versions(len(ids), self._version))
            self.tokens_committed += recorded
            self.tokens_late += len(ids) - recorded
            if reason is not None:
                if ids and ids[-1] in request.stop:
                    reason = FinishReason.STOP
                elif len(ids) >= attempt.max_tokens:
                    reason = FinishReason.LENGTH
                attempt.finish(reason)
        except InferenceError as error:
            request.error = error

    def _loop_ended(self) -> None:
        manager = self._manager
        if manager is None:
            return  # the block was left
        error = manager.fatal_error
        self._break(f"the generation loop died: {error or 'nobody knows why'}", error)

    def _break(self, fault: str, cause: BaseException | None) -> None:
        """Fails everything in flight and everything to come."""
        self._fault, self._cause = fault, cause
        for request in list(self._open.values()):
            self._cut(request, None)
            request.error = InferenceError(fault)
            request.error.__cause__ = cause

    # Weights and memory; only while the loop is parked

    def _check_not_released(self, call: str) -> None:
        if self._freed:
            raise InferenceError(
                f"{call}() while {', '.join(self._freed)} released", maybe_executed=False
            )

    def _free(self, manager: Manager, tags: Collection[ReleaseTag]) -> None:
        if "kv" in tags:
            self._freed["kv"] = Freed(manager.cache_tensors, keep=False)
        if "weights" in tags:
            on_cpu = self._model.device.type == "cpu"
            tensors = () if on_cpu else self._model.state_dict(keep_vars=True).values()
            self._freed["weights"] = Freed(tensors, keep=True)

    def _restore(self, tags: Collection[ReleaseTag]) -> None:
        for tag in tags:
            self._freed[tag].restore()
            del self._freed[tag]

    def _load(self, source: Any, version: int) -> None:
        _cb_weights.load(self._model, source)
        self._adopt(version)

    async def _let_update(self, source: Callable[[], Any], version: int) -> None:
        try:
            await source()
        except WeightUpdateFailed:
            raise
        except Exception as error:
            raise WeightUpdateFailed(
                f"the callable that updates the weights raised {error!r}",
                weights=WeightsState.UNKNOWN,
            ) from error
        except BaseException as error:
            self._break(
                "an update of the weights was cancelled, so nobody knows what they are", error
            )
            raise
        self._adopt(version)

    def _adopt(self, version: int) -> None:
        """Makes tokens of the new weights known as such, from the next one on."""
        if self._manager is not None:
            self._manager.requeue_all()
        # The loop is parked between two forward passes and no batch is in the air (`use_async_batching=False`), so
        # exactly the tokens that stand here were made by the weights before.
        for request in list(self._open.values()):
            request.seal(self._version)
        self._version = version
        self._fault = self._cause = None


class _Request:
    """An attempt in flight."""

    __slots__ = ("attempt", "done", "error", "generation", "sealed", "stop")

    def __init__(self, attempt: Attempt, generation: Generation, stop: frozenset[int]) -> None:
        self.attempt = attempt
        self.generation = generation
        self.stop = stop
        self.done = anyio.Event()
        self.error: InferenceError | None = None
        self.sealed: list[tuple[int, int]] = []

    def seal(self, version: int) -> None:
        """Notes that all tokens so far, back to the seal before, are of this version."""
        self.sealed.append((len(self.generation.read()[0]), version))

    def versions(self, count: int, present: int) -> int | list[int]:
        """Returns the version of each of the tokens; those after the last seal are of the present one."""
        if not self.sealed:
            return present
        versions: list[int] = []
        for stop, version in self.sealed:
            versions += [version] * (stop - len(versions))
        return versions + [present] * (count - len(versions))


class _PauseHolder:
    """Holds the manager's pause, entered and left on one thread: transformers counts pauses by thread.

    Attributes:
        parked: Set once no forward pass can run, or once it is clear that it failed.
        error: Why it failed.
    """

    def __init__(self, manager: Manager, holders: set[_PauseHolder]) -> None:
        self.parked = anyio.Event()
        self.error: RuntimeError | None = None
        self._manager = manager
        self._holders = holders  # those whose thread has not ended; the controller's
        holders.add(self)
        self._over = anyio.Event()
        self._let_go = threading.Event()
        self._busy = threading.Lock()
        self._call_soon = loop_caller()
        self._thread = threading.Thread(target=self._hold, name="rollnest pause holder")
        self._thread.start()

    def let_go(self) -> None:
        """Ends the pause as soon as the loop has parked; never blocks."""
        self._let_go.set()

    async def release(self) -> None:
        """Ends the pause; returns once it is over.

        Cancellation: it ends all the same.
        """
        self.let_go()
        await self._over.wait()

    def during(self, work: Callable[[], None]) -> None:
        """Runs something that the pause may not end before. Blocks."""
        with self._busy:
            work()

    def _hold(self) -> None:
        try:
            with self._manager.pause():
                self._call_soon(self.parked.set)
                self._let_go.wait()
                with self._busy:  # a cancelled update's copy is finished first
                    pass
        except RuntimeError as error:  # the loop is gone
            self.error = error
        finally:
            self._call_soon(self._finish)

    def _finish(self) -> None:
        self._thread.join()  # this call was its last act
        self._holders.discard(self)
        self.parked.set()
        self._over.set()


def _filters(top_p: float, top_k: int | None) -> dict[SamplingField, Any]:
    return {"top_p": top_p, "top_k": top_k}


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers model, got {type(model).__name__}")
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(f"model must be a causal language model, got {type(model).__name__}")
    if model.device.type == "meta":
        raise ValueError("model is on the meta device: it has no weights")


def _check_whole(name: str, value: Any, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < lowest:
        raise ValueError(f"{name} must be >= {lowest}, got {value}")


def _context(config: Any, asked: int | None) -> int:
    most: int | None = getattr(config, "max_position_embeddings", None)
    if asked is None:
        if most is None:
            raise ValueError(
                f"max_context is needed: {type(config).__name__} does not say how long a context may be"
            )
        return most
    _check_whole("max_context", asked, 2)
    if most is not None and asked > most:
        raise ValueError(f"max_context must be <= the model's {most}, got {asked}")
    return asked


def _stop_ids(model: Any, vocab_size: int, asked: Collection[int] | None) -> frozenset[int]:
    ids: list[int] = _model_stop_ids(model) if asked is None else list(asked)
    for i in ids:
        _check_whole("an item of stop_token_ids", i, 0)
        if i >= vocab_size:
            raise ValueError(f"stop_token_ids holds {i}, the vocabulary is {vocab_size}")
    return frozenset(ids)


def _model_stop_ids(model: Any) -> list[int]:
    found: Any = None
    if model.generation_config is not None:
        found = model.generation_config.eos_token_id
    if found is None:
        found = model.config.get_text_config().eos_token_id
    ids: list[int] = [] if found is None else [found] if isinstance(found, int) else list(found)
    return [i for i in ids if i >= 0]  # -1 is transformers' word for none
