"""Checkpoints as folders: whole or not there, whatever happens while they are written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollnest import _checkpoint
from rollnest._checkpoint import (
    Cancelled,
    checkpoints,
    pack,
    read_files,
    read_manifest,
    unpack,
    write,
)
from rollnest.errors import CheckpointError

FILES = {"a.json": [b'{"a": 1}'], "b.bin": [b"x" * 700_000, b"y" * 5]}


def save(
    directory: Path,
    said: str = "one",
    *,
    keep_last: int = 2,
    is_cancelled: Callable[[], bool] = bool,
) -> Path:
    files = {**FILES, "said": [said.encode()]}
    return write(
        directory, files, lambda: {"run": "r"}, keep_last=keep_last, is_cancelled=is_cancelled
    )


def said(folder: Path) -> str:
    return read_files(folder)[1]["said"].decode()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "deep" / "er")
    assert folder.name == "checkpoint-000001"
    manifest, files = read_files(folder)
    assert files == {"a.json": b'{"a": 1}', "b.bin": b"x" * 700_000 + b"y" * 5, "said": b"one"}
    assert (manifest["run"], manifest["number"], manifest["schema"]) == ("r", 1, 1)
    assert read_manifest(folder) == manifest


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for number in range(5):
        save(tmp_path, str(number))
    assert names(tmp_path) == ["checkpoint-000004", "checkpoint-000005"]
    assert [said(path) for path in checkpoints(tmp_path)] == ["3", "4"]
    save(tmp_path, "5", keep_last=1)
    assert names(tmp_path) == ["checkpoint-000006"]
    assert checkpoints(tmp_path / "nowhere") == []


def test_numbers_sort_beyond_their_digits(tmp_path: Path) -> None:
    for number in (999_999, 1_000_000):
        (tmp_path / f"checkpoint-{number:06d}").mkdir()
    assert save(tmp_path).name == "checkpoint-1000001"
    assert [path.name for path in checkpoints(tmp_path)] == [
        "checkpoint-1000000",
        "checkpoint-1000001",
    ]


class Killed(BaseException):
    """Stands for a process that ends here: nothing is cleaned up after it."""


def writing_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Has the n-th call that touches the disk end the process, as far as its files are concerned."""
    calls: list[str] = []
    left = [0]

    def arm(module: Any, name: str) -> None:
        real = getattr(module, name)

        def act(*args: Any, **options: Any) -> Any:
            calls.append(name)
            left[0] -= 1
            if not left[0]:
                raise Killed
            return real(*args, **options)

        monkeypatch.setattr(module, name, act)

    arm(os, "fsync")
    arm(Path, "rename")
    arm(Path, "mkdir")
    arm(Path, "open")
    real_rmtree = shutil.rmtree

    def rmtree(*args: Any, **options: Any) -> None:
        if left[0] > 0:
            real_rmtree(*args, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)  # a killed process cleans nothing up

    def begin(at: int) -> list[str]:
        calls.clear()
        left[0] = at
        return calls

    return begin


def test_bug_078_a_process_killed_at_any_step_of_writing_leaves_the_old_one_whole(
    tmp_path: Path,
) -> None:
    """Half-written checkpoints: after a kill while step 7 was saved, step 6 is read without an error."""
    seen: set[str] = set()
    for at in range(1, 100):
        directory = tmp_path / str(at)
        save(directory, "old")
        with pytest.MonkeyPatch.context() as patch:
            calls = writing_steps(patch)(at)
            try:
                save(directory, "new", keep_last=1)
                killed = False
            except Killed:
                killed = True
        seen.update(calls[-1:])
        texts = [said(path) for path in checkpoints(directory)]
        assert texts in (["old"], ["old", "new"], ["new"])
        assert killed or texts == ["new"]
        save(directory, "again", keep_last=1)
        assert [said(path) for path in checkpoints(directory)] == ["again"]
        assert len(names(directory)) == 1  # nothing is left of what was killed
        if not killed:
            break
    else:
        pytest.fail("it never ended")
    assert seen >= {"fsync", "rename", "mkdir", "open"}
    # Each file, the manifest, and both folders; "said" is one of the files.
    assert calls[: calls.index("rename") + 2].count("fsync") == len(FILES) + 1 + 1 + 2
    assert at > 10


def test_a_full_disk_says_so_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"checkpoint-000002 was not written.*No space left"):
        save(tmp_path, "new")
    assert names(tmp_path) == ["checkpoint-000001"]
    assert said(checkpoints(tmp_path)[0]) == "old"


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match=r"can't write checkpoints to .*file"):
        save(file)


def test_an_error_while_the_content_is_made_leaves_nothing(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x"
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        write(tmp_path, {"a": pieces()}, dict, keep_last=1)
    assert names(tmp_path) == []


def test_a_cancelled_one_leaves_nothing(tmp_path: Path) -> None:
    asked = iter([False, False, True])
    with pytest.raises(Cancelled):
        save(tmp_path, is_cancelled=lambda: next(asked))
    assert names(tmp_path) == []


# Damage


def damaged(folder: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    return folder


@pytest.mark.parametrize("name", ["a.json", "b.bin", "said"])
def test_a_flipped_bit_is_seen(tmp_path: Path, name: str) -> None:
    folder = damaged(save(tmp_path), name, lambda data: bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(CheckpointError, match=f"{folder}.*checksum of '{name}'"):
        read_files(folder)


@pytest.mark.parametrize("name", ["a.json", "b.bin", "said"])
def test_a_truncated_file_is_seen(tmp_path: Path, name: str) -> None:
    folder = damaged(save(tmp_path), name, lambda data: data[:-1])
    with pytest.raises(CheckpointError, match=f"'{name}' has \\d+ bytes, not"):
        read_files(folder)


def test_a_missing_file_is_seen(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / "b.bin").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the file 'b\.bin'"):
        read_files(folder)


def test_a_damaged_manifest_is_seen_wherever(tmp_path: Path) -> None:
    folder = save(tmp_path)
    path = folder / "manifest.json"
    good = path.read_bytes()
    whole = json.loads(good)
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x20]) + good[at + 1 :])
        try:
            read_files(folder)
        except CheckpointError:
            continue
        assert json.loads(path.read_bytes()) == whole  # white space
    path.write_bytes(good[:-20])
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        read_manifest(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        read_manifest(folder)


def test_another_schema_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checkpoint, "SCHEMA", 2)
    folder = save(tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has schema 2; this version of rollnest reads"):
        read_files(folder)


def test_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": "zip"}')
    with pytest.raises(CheckpointError, match="not that of a rollnest checkpoint"):
        read_manifest(tmp_path)


# In memory


def test_what_was_packed_is_unpacked() -> None:
    packed = pack(FILES, lambda: {"run": "r"})
    manifest, files = unpack(packed)
    assert files == {name: b"".join(pieces) for name, pieces in FILES.items()}
    assert manifest["run"] == "r"


@pytest.mark.parametrize(
    ("name", "data", "error", "said"),
    [
        ("a.json", None, CheckpointError, "state lacks the file 'a.json'"),
        ("manifest.json", None, CheckpointError, "none of an engine"),
        ("a.json", b"[]", CheckpointError, "'a.json' has 2 bytes, not 8"),
        ("a.json", "text", TypeError, "got str for 'a.json'"),
        ("manifest.json", b"{", CheckpointError, "is damaged"),
    ],
)
def test_what_is_no_state_is_named(
    name: str, data: object, error: type[Exception], said: str
) -> None:
    packed: dict[str, Any] = {**pack(FILES, dict), name: data}
    with pytest.raises(error, match=said):
        unpack({name: data for name, data in packed.items() if data is not None})
