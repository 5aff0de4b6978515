"""The table of the docs says what each controller says of itself, and what the fault servers saw of it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollnest import Engine, Prompt, Sampling, TaskSpec
from rollnest.abc import Capabilities, PauseMode
from rollnest.errors import WeightUpdateFailed
from rollnest_adapters.transformers import TransformersController

from .conformance import attempt
from .hand_clock import hand_backends
from .http_cases import HttpCase, LlamacppCase, LmdeployCase, SglangCase, VllmCase
from .tiny_llama import tiny_llama

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[1] / "docs" / "topics" / "servers.md"
COLUMNS: dict[str, Callable[[], HttpCase]] = {
    "vLLM": VllmCase,
    "SGLang": SglangCase,
    "LMDeploy": LmdeployCase,
    "llama.cpp": LlamacppCase,
}

BACKED = {
    "module": "test_conformance_http::test_conformance test_conformance_transformers::test_conformance",
    "token ids in and out": "conformance::check_greedy_is_repeatable",
    "a stream's parts": "test_other_servers::test_a_cumulative_stream_of_sglang_is_taken_once",
    "logprobs": "conformance::check_sampled_tokens_have_logprobs_and_versions",
    "others": "test_vllm_controller::test_the_mode_of_logprobs_is_declared "
    "test_logprob_modes::test_bug_099_raw_and_processed_logprobs_are_not_mixed",
    "sampling": "test_vllm_controller::test_sampling_is_sent_in_its_words "
    "test_other_servers::test_sglang_is_sent_its_own_words "
    "test_other_servers::test_lmdeploy_is_sent_its_own_words "
    "test_other_servers::test_llamacpp_is_sent_its_own_words "
    "conformance::check_stop_includes_the_stop_id",
    "past an end of sequence": "test_capability_table::test_the_table_says_what_the_controllers_say",
    "`n` of a request": "test_capability_table::test_a_group_is_made_of_requests_for_one",
    "abort of one": "conformance::check_abort_of_one_leaves_the_others",
    "abort of all": "conformance::check_abort_of_all_ends_all",
    "partial on abort": "conformance::check_abort_is_a_result_that_keeps_the_partial",
    "pauses": "conformance::check_no_forward_pass_while_paused",
    "WAIT and EVICT": "test_pause_modes::test_wait_lets_the_turns_end "
    "test_pause_evict::test_groups_wait_with_everything_they_received",
    "resume": "conformance::check_resume_is_idempotent_and_leaves_no_flag",
    "requests during a pause": "conformance::check_no_forward_pass_while_paused",
    "weights from a directory": "conformance::check_update_changes_version_and_answers",
    "weights that the trainer moves": "test_http_faults::test_weights_that_somebody_moved_get_their_label",
    "label at the server": "test_vllm_controller::test_the_label_of_its_weights_is_a_version",
    "version of each token": "conformance::check_frozen_requests_go_on_under_new_weights",
    "older cache is not used": "test_http_faults::test_frozen_requests_use_nothing_of_older_weights",
    "memory given back": "conformance::check_release_and_reload_change_nothing",
    "routed experts": "test_capability_table::test_a_group_is_made_of_requests_for_one",
    "affinity": "test_capability_table::test_the_table_says_what_the_servers_see",
    "health": "conformance::check_health_is_told_at_any_time",
    "load": "test_vllm_controller::test_health_tells_the_load "
    "test_other_servers::test_health_of_sglang_in_a_pause test_other_servers::test_health_of_llamacpp",
    "runs on a CPU": "live/live_vllm::test_tokens_and_logprobs_come_with_their_version "
    "test_conformance_transformers::test_conformance",
}
"""The tests that each row stands on."""


@pytest.fixture(params=hand_backends(), ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    make: Callable[[], tuple[str, dict[str, Any]]] = request.param
    return make()


def table() -> dict[str, dict[str, str]]:
    """What the docs say, by row and server."""
    text = PAGE.read_text(encoding="utf-8").partition("## What each can do")[2]
    lines = text.strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:2]]
    rows: dict[str, dict[str, str]] = {}
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        name, *values = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = dict(zip(cells[0][1:], values, strict=True))
    return rows


def test_every_row_is_backed_by_tests() -> None:
    assert list(table()) == list(BACKED)
    for row, names in BACKED.items():
        for name in names.split():
            module, _, function = name.partition("::")
            tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
            defined = {
                node.name
                for node in tree.body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert function in defined, f"{row!r} stands on {name}, which isn't there"


def said(row: str, server: str) -> set[str]:
    return set(table()[row][server].replace("-", "").split())


def agrees(server: str, known: Capabilities) -> None:
    if server != "vLLM":  # its mode is an option
        assert said("logprobs", server) == {known.logprobs}
    assert said("sampling", server) == known.sampling
    past = "`min_tokens`" if "min_tokens" in known.sampling else "-"
    assert table()["past an end of sequence"][server] == past
    assert said("pauses", server) == {mode.name for mode in known.pause_modes}
    assert said("memory given back", server) == known.release_tags
    assert said("version of each token", server) == {"yes" if known.version_spans else "no"}


@pytest.mark.parametrize("server", COLUMNS)
async def test_the_table_says_what_the_controllers_say(server: str) -> None:
    async with COLUMNS[server]().opened() as controller:
        agrees(server, controller.capabilities)


def test_the_table_says_what_the_transformers_controller_says() -> None:
    agrees("transformers", TransformersController(tiny_llama()).capabilities)


@pytest.mark.parametrize("server", COLUMNS)
async def test_the_table_says_what_the_servers_see(server: str) -> None:
    case = COLUMNS[server]()
    async with case.opened() as controller:
        rows = {name: row[server] for name, row in table().items()}
        one = attempt(case.prompt(0))
        one.affinity = "rollout-7"
        await controller.generate(one)
        (request,) = case.requests()
        assert request.path == rows["token ids in and out"].strip("`")
        header = rows["affinity"].strip("`").lower()
        assert header == "-" or request.headers[header] == "rollout-7"
        health = await controller.health()
        assert ("GET", rows["health"].strip("`")) in case.server.calls
        load = {
            name for name in ("running", "waiting", "cache") if getattr(health, name) is not None
        }
        assert load == said("load", server)
        await controller.pause(PauseMode.ABORT)
        try:
            await controller.update_weights("/models/other", 1)
            loads = "yes"
        except WeightUpdateFailed:
            loads = "no"
        assert rows["weights from a directory"] == loads
        assert (await controller.version() is not None) == (rows["label at the server"] == "yes")
        assert case.can_abort is not ("connection" in rows["abort of one"])
        await controller.resume()
        resumed = ("POST", rows["resume"].strip("`"))
        assert rows["resume"] == "here" or case.server.calls[-1] == resumed


@pytest.mark.parametrize("server", COLUMNS)
async def test_a_group_is_made_of_requests_for_one(server: str) -> None:
    case = COLUMNS[server]()
    task = TaskSpec(
        "task",
        [Prompt("p", token_ids=[1, 2])],
        judger=None,
        group_size=4,
        epochs=1,
        sampling=Sampling(3),
    )
    async with case.server.serve():
        async with Engine(case.make(case.server.url), task) as engine:
            batch = await engine.next_batch(1)
        requests = case.requests()
    assert [len(sample.turns[0]) for sample in batch.samples] == [3] * 4
    assert len(requests) == 4
    for request in requests:
        body = request.json()
        sampling = body.get("sampling_params", body)
        assert sampling.get("n", 1) == sampling.get("n_cmpl", 1) == 1
        assert not body.get("return_routed_experts")
