"""Checkpoints as folders of files: written whole or not at all, and checked before anything is read from them.

    DIR/checkpoint-000007/      one checkpoint; a folder of this name is complete
        manifest.json           what it is, with the size and checksum of every other file, and its own checksum
        ...
    DIR/.writing-...            one that is being written, or whose writer was killed

A checkpoint is written beside the others, brought to the disk file by file, and gets its name last, in one step. So a
crash at any byte leaves the older ones as they were. Which files there are, and what is in them, is not known here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from .errors import CheckpointError, describe

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Cancelled",
    "Files",
    "Manifest",
    "checkpoints",
    "pack",
    "read_files",
    "read_manifest",
    "unpack",
    "write",
]

FORMAT = "rollnest checkpoint"
SCHEMA = 1
MANIFEST = "manifest.json"

Manifest = Mapping[str, Any]
Files = Mapping[str, Iterable[bytes | memoryview]]
"""The files of a checkpoint, by name: each in pieces, made when it is written, in this order."""

_NAME = re.compile(r"checkpoint-(\d{6,})")
_WRITING = ".writing-"
_REMOVING = ".removing-"
_PIECE = 2**18  # bytes written at once: small pieces are gathered


class Cancelled(Exception):
    """Nobody wants the checkpoint any more."""


def checkpoints(directory: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, oldest first; none if there is no such folder."""
    if not directory.is_dir():
        return []
    found = [(int(m[1]), p) for p in directory.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def write(
    directory: Path,
    files: Files,
    manifest: Callable[[], Manifest],
    *,
    keep_last: int,
    is_cancelled: Callable[[], bool] = bool,
) -> Path:
    """Writes a checkpoint beside those in a folder, and then removes the oldest.

    Args:
        directory: The folder; it is made if there is none.
        files: What to write.
        manifest: Asked for what else the manifest says, once the files are written.
        keep_last: How many checkpoints stay, the new one among them.
        is_cancelled: Asked again and again; once it says so, nothing is left behind.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: It could not be written. What had been written of it is removed.
        Cancelled: It was cancelled.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _tidy(directory)
        known = checkpoints(directory)
        number = 1 + max((_number(path) for path in known), default=0)
        folder = directory / f"checkpoint-{number:06d}"
        part = directory / f"{_WRITING}{uuid4().hex}"
    except OSError as error:
        raise CheckpointError(f"can't write checkpoints to {directory}: {error}") from error
    try:
        part.mkdir()
        sums = {name: _write(part / name, pieces, is_cancelled) for name, pieces in files.items()}
        text = _manifest_text(manifest(), sums, number)
        _write(part / MANIFEST, [text], is_cancelled)
        _sync(part)
        part.rename(folder)
        _sync(directory)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {folder} was not written: {describe(error)}; older ones are whole"
        ) from error
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for path in [*known, folder][:-keep_last]:
        _remove(path)
    return folder


def pack(files: Files, manifest: Callable[[], Manifest]) -> dict[str, bytearray]:
    """Returns a checkpoint's files in memory, the manifest among them."""
    packed = {name: bytearray().join(pieces) for name, pieces in files.items()}
    sums = {name: _Sum().add(data) for name, data in packed.items()}
    packed[MANIFEST] = bytearray(_manifest_text(manifest(), sums, 0))
    return packed


def read_manifest(folder: Path) -> Manifest:
    """Reads what a checkpoint is.

    Raises:
        CheckpointError: There is none, it is damaged, or another version of rollnest wrote it.
    """
    path = folder / MANIFEST
    try:
        return _manifest(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{folder} is no checkpoint: {describe(error)}") from error


def read_files(folder: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Reads a checkpoint and checks every byte of it.

    Raises:
        CheckpointError: A file is missing, or is not what was written; names it.
    """
    manifest = read_manifest(folder)
    read: dict[str, bytes] = {}
    for name in manifest["files"]:
        try:
            read[name] = (folder / name).read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {folder} lacks the file {name!r}: {describe(error)}"
            ) from error
    _check(manifest, read, f"checkpoint {folder}")
    return manifest, read


def unpack(packed: Mapping[str, Any]) -> tuple[Manifest, dict[str, bytes]]:
    """Checks what `pack` returned.

    Raises:
        CheckpointError: It is none, or is not what was packed.
        TypeError: It holds something else than bytes.
    """
    files: dict[str, bytes] = {}
    for name, data in packed.items():
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"state must hold bytes, got {type(data).__name__} for {name!r}")
        files[name] = bytes(cast("bytes", data))
    if MANIFEST not in files:
        raise CheckpointError(f"state is none of an engine: it has no {MANIFEST!r}")
    manifest = _manifest(files.pop(MANIFEST), f"state[{MANIFEST!r}]")
    _check(manifest, files, "state")
    return manifest, files


class _Sum:
    """Adds up a file's size and checksum."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._size = 0

    def add(self, data: bytes | bytearray | memoryview) -> _Sum:
        self._hash.update(data)
        self._size += len(data)
        return self

    @property
    def entry(self) -> dict[str, Any]:
        return {"bytes": self._size, "blake2b": self._hash.hexdigest()}


def _write(
    path: Path, pieces: Iterable[bytes | memoryview], is_cancelled: Callable[[], bool]
) -> _Sum:
    total = _Sum()
    with path.open("xb", buffering=0) as file:
        for data in _gathered(pieces):
            if is_cancelled():
                raise Cancelled
            total.add(data)
            rest = memoryview(data)
            while rest:  # an unbuffered file may take less than it is given
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return total


def _gathered(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """Joins small pieces; large ones are cut, so that a cancellation is heard and nothing is copied."""
    gathered = bytearray()
    for piece in pieces:
        if len(piece) < _PIECE:
            gathered += piece
        else:
            if gathered:
                yield gathered
                gathered = bytearray()
            view = memoryview(piece)
            for at in range(0, len(view), _PIECE):
                yield view[at : at + _PIECE]
        if len(gathered) >= _PIECE:
            yield gathered
            gathered = bytearray()
    if gathered:
        yield gathered


def _sync(folder: Path) -> None:
    """Brings a folder's entries to the disk, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Takes a checkpoint's name away first: one that is half removed must not look complete."""
    try:
        doomed = path.with_name(f"{_REMOVING}{uuid4().hex}")
        path.rename(doomed)
    except OSError:
        return  # the next one tries again
    shutil.rmtree(doomed, ignore_errors=True)


def _tidy(directory: Path) -> None:
    """Removes what a writer left that was killed."""
    for path in directory.iterdir():
        if path.name.startswith((_WRITING, _REMOVING)):
            shutil.rmtree(path, ignore_errors=True)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return 0 if match is None else int(match[1])


def _manifest_text(manifest: Manifest, sums: Mapping[str, _Sum], number: int) -> bytes:
    whole = {
        "format": FORMAT,
        "schema": SCHEMA,
        "number": number,
        **manifest,
        "files": {name: total.entry for name, total in sums.items()},
    }
    signed = {**whole, "blake2b": _signature(whole)}
    return json.dumps(signed, indent=1, sort_keys=True).encode() + b"\n"


def _signature(manifest: Manifest) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _manifest(data: bytes, where: str) -> Manifest:
    try:
        read: Any = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{where} is damaged: {describe(error)}") from None
    if not isinstance(read, dict) or cast("Manifest", read).get("format") != FORMAT:
        raise CheckpointError(f"{where} is not that of a rollnest checkpoint")
    manifest = cast("dict[str, Any]", read)
    if manifest.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{where} has schema {manifest.get('schema')!r}; this version of rollnest reads schema {SCHEMA}"
        )
    signature = manifest.pop("blake2b", None)
    if signature != _signature(manifest):
        raise CheckpointError(f"{where} is damaged: its checksum is not that of its content")
    return manifest


def _check(manifest: Manifest, files: Mapping[str, bytes], where: str) -> None:
    for name, expected in manifest["files"].items():
        if name not in files:
            raise CheckpointError(f"{where} lacks the file {name!r}")
        data = files[name]
        if len(data) != expected["bytes"]:
            raise CheckpointError(
                f"{where} is damaged: {name!r} has {len(data)} bytes, not {expected['bytes']}"
            )
        if _Sum().add(data).entry != expected:
            raise CheckpointError(
                f"{where} is damaged: the checksum of {name!r} is not what was written"
            )
