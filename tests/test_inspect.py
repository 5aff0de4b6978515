"""`rollnest inspect` and `inspect_checkpoint`: what is in a checkpoint, said without its tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from anyio import create_task_group, sleep

from rollnest import (
    AsyncStrategy,
    CheckpointInfo,
    Engine,
    PauseMode,
    Rollout,
    Sampling,
    TaskSpec,
    inspect_checkpoint,
)
from rollnest.errors import CheckpointError
from rollnest.testing import ScriptedController
from rollnest_adapters.cli import main

from .helpers import prompts
from .test_checkpoints import Counting

pytestmark = pytest.mark.anyio


async def look_up(number: int) -> int:
    await sleep(4)
    return 500 + number


async def tool_turns(rollout: Rollout) -> None:
    for number in range(2):
        await rollout.generate()
        rollout.append([await rollout.tool(look_up, number)])


async def saved(path: Path) -> None:
    """A run with a bit of everything."""
    tasks = [
        TaskSpec(
            "tools",
            prompts(5),
            judger=None,
            loop=tool_turns,
            group_size=1,
            epochs=2,
            shuffle=False,
            sampling=Sampling(2),
            strategy=AsyncStrategy(max_staleness=9, lead=2),
        ),
        TaskSpec(
            "source", Counting(3), judger=None, group_size=2, sampling=Sampling(3), weight=0.5
        ),
    ]
    controller = ScriptedController(rate=1.0, stream=True, stop_every=10_000)
    async with Engine(controller, tasks, batch_size=3) as engine, create_task_group() as group:
        await engine.save(path)
        batch = await engine.next_batch()
        assert len(batch.groups) == 3
        async with engine.paused(PauseMode.ABORT) as pause:
            await pause.update_weights({})
        await sleep(8.5)
        await engine.save(path)
        group.cancel_scope.cancel()


async def test_what_is_in_it(tmp_path: Path) -> None:
    await saved(tmp_path)
    info = inspect_checkpoint(tmp_path)
    assert info.tasks == inspect_checkpoint(tmp_path / "checkpoint-000002").tasks
    assert (info.version, info.batches, info.uncommitted, info.others) == (
        1,
        1,
        {1: 3},
        ["checkpoint-000001"],
    )
    tools, source = info.tasks["tools"], info.tasks["source"]
    assert tools.prompts == 5
    assert (tools.drawn, tools.delivered) == (5 * tools.epoch + tools.position, 2)
    assert sum(tools.places.values()) == tools.drawn - 2
    assert tools.places == {"ready": 4, "flight": 2}
    assert tools.samples == {"completed": 4, "aborted": 2}
    assert tools.partial_turns == 0
    assert (tools.journals, tools.turns, tools.calls, tools.unknown_calls) == (2, 4, 4, 2)
    assert tools.versions == {0: 4, 1: 2}
    assert (source.prompts, source.epoch, source.position, source.delivered) == (None, 0, 1, 1)
    assert source.places == {}
    assert info.size == sum(
        path.stat().st_size
        for path in Path(info.path).iterdir()  # noqa: ASYNC240
        if path.name != "manifest.json"
    )


async def test_it_is_printed(tmp_path: Path) -> None:
    await saved(tmp_path)
    info = inspect_checkpoint(tmp_path)
    lines = {line.split()[0]: line for line in str(info).splitlines() if line}
    assert lines["weights"].endswith("version 1")
    assert lines["batches"].endswith("1, not committed: 1 (3 groups)")
    assert "4 ready, 2 flight" in str(info)
    assert "epoch 1, 3 of 5 drawn" in str(info)
    assert "1 given by its source" in str(info)
    assert "4 v0, 2 v1 samples" in str(info)
    assert repr(info) == f"<CheckpointInfo of {info.path}: v1, 1 batches, tasks tools, source>"


async def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await saved(tmp_path)
    info = inspect_checkpoint(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{info}\n"
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read == json.loads(json.dumps(info.as_dict()))
    assert read["tasks"]["tools"]["places"] == {"ready": 4, "flight": 2}
    (Path(info.path) / "groups.jsonl").write_text("")
    assert main(["inspect", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "checkpoint-000002 is damaged: 'groups.jsonl' has 0 bytes" in said


def test_nothing_to_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*nowhere"):
        inspect_checkpoint(tmp_path / "nowhere")
    assert main(["inspect", str(tmp_path)]) == 1
    assert f"{tmp_path} is no checkpoint" in capsys.readouterr().err


async def test_an_empty_one(tmp_path: Path) -> None:
    task = TaskSpec("task", prompts(2), judger=None)
    async with Engine(ScriptedController(), task) as engine:
        await engine.save(tmp_path)
    info = inspect_checkpoint(tmp_path)
    assert isinstance(info, CheckpointInfo)
    assert info.tasks["task"].places == {}
    assert "none" in str(info)
