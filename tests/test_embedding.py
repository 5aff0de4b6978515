"""The functions of `docs/embedding.md`, on both event loops, with a controller that writes down how it is called."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollnest import AsyncStrategy, Batch, ProduceStrategy, SyncStrategy
from rollnest.abc import Attempt, PauseMode, ReleaseTag, WeightSource
from rollnest_adapters.demo.policy import new_policy
from rollnest_adapters.transformers import TransformersController

from .test_docs_code_blocks import ROOT, blocks_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param  # with real clocks: a model works in threads of its own
    return backend


class Written(TransformersController):
    """Writes down its calls, in order."""

    def __init__(self) -> None:
        super().__init__(new_policy(seed=1), max_requests=64, seed=0)
        self.calls: list[str] = []

    async def generate(self, attempt: Attempt) -> None:
        self.calls.append("generate")
        await super().generate(attempt)

    async def abort(self, ids: Collection[str] | None) -> None:
        self.calls.append("abort")
        await super().abort(ids)

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        self.calls.append("pause")
        await super().pause(mode)

    async def resume(self) -> None:
        self.calls.append("resume")
        await super().resume()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        self.calls.append("update")
        await super().update_weights(source, version)

    async def version(self) -> int:
        self.calls.append("version")
        return await super().version()

    async def release(self, tags: Collection[ReleaseTag]) -> None:
        await super().release(tags)
        self.calls.append("released " + ", ".join(sorted(tags)))

    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        self.calls.append("reload " + ", ".join(sorted(tags)))
        await super().reload(tags)


@pytest.fixture
def page() -> Iterator[dict[str, Any]]:
    """What the page defines, without its runs."""
    text = Path(ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "page"}
    threads = torch.get_num_threads()
    for block in blocks_of(text):
        if block.kind == "python":
            definitions, _, _ = block.code.partition("\nbatches = anyio.run(")
            exec(compile(definitions, "docs/embedding.md", "exec"), namespace)
    yield namespace
    torch.set_num_threads(threads)


@pytest.mark.parametrize("strategy", [SyncStrategy(), AsyncStrategy(max_staleness=1, lead=1)])
async def test_colocated_the_controller_gets_no_call_while_released(
    page: dict[str, Any], strategy: ProduceStrategy
) -> None:
    controller = Written()
    page["controller"] = lambda: controller
    batches: list[Batch] = await page["colocated"](strategy, 3)
    calls = [call for call in controller.calls if call not in ("generate", "abort")]
    one_pause = ["pause", "released kv, weights", "reload weights", "update", "version"]
    assert calls == ["version", *[*one_pause, "reload kv", "resume"] * 3]
    released: set[str] = set()
    for call in controller.calls:
        word, _, tags = call.partition(" ")
        if word == "released":
            released |= set(tags.split(", "))
        elif word == "reload":
            released -= set(tags.split(", "))
        else:
            assert "weights" not in released, controller.calls
            assert "kv" not in released or word in ("update", "version"), controller.calls
    assert [batch.version for batch in batches] == [0, 1, 2]


async def test_disaggregated_lags_are_as_they_are_bounded(page: dict[str, Any]) -> None:
    for bound in (0, 1, 2):
        strategy = AsyncStrategy(max_staleness=bound)
        batches: list[Batch] = await page["disaggregated"](strategy, 5)
        assert set(page["lags"](batches)) == set(range(bound + 1))


async def test_with_publish_every_and_a_filter_nothing_stalls(page: dict[str, Any]) -> None:
    batches: list[Batch] = await page["every_third_step"](7)
    assert [batch.version for batch in batches] == [0, 0, 0, 1, 1, 1, 2]
    assert all(len(batch) == 8 for batch in batches)
