"""Packed columns in one file, in the format of safetensors: a JSON header with types and offsets, then raw bytes.

Any safetensors reader opens it. What is read is checked before anything is made of it: types, shapes, and that the
columns lie one after the other and fill the file.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from attrs import frozen

__all__ = ["Column", "ColumnError", "ColumnData", "read_columns", "write_columns"]

ColumnData: TypeAlias = "array[int] | array[float]"

_TYPES = {"i": "I32", "f": "F32", "q": "I64"}
_CODES = {name: code for code, name in _TYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes; the format's own bound


class ColumnError(ValueError):
    """The bytes are no such file."""


@frozen
class _Slot:
    """Where a column lies among the raw bytes."""

    code: str
    start: int
    stop: int


@frozen(eq=False)
class Column:
    """A column to be written, in pieces that are made when they are written.

    Attributes:
        code: The array type of all pieces.
        count: How many numbers it has.
        pieces: The pieces: arrays, or views of them.
    """

    code: str
    count: int
    pieces: Iterable[ColumnData | memoryview[Any]]

    @classmethod
    def of(cls, pieces: Sequence[ColumnData | memoryview[Any]]) -> Column:
        """A column of pieces that are there."""
        return cls(memoryview(pieces[0]).format, sum([len(piece) for piece in pieces]), pieces)


def write_columns(
    columns: Mapping[str, Column | Sequence[ColumnData | memoryview[Any]]],
) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a file, piece by piece; the columns' own bytes are not copied.

    Args:
        columns: By name, each as the pieces that it is put together of, arrays or views of them; all pieces of one
            column have one type. One without pieces is left out.
    """
    header: dict[str, Any] = {}
    at = 0
    made = {
        name: column if isinstance(column, Column) else Column.of(column)
        for name, column in columns.items()
        if isinstance(column, Column) or column
    }
    for name, column in made.items():
        size = column.count * array(column.code).itemsize
        kind = _TYPES[column.code]
        header[name] = {"dtype": kind, "shape": [column.count], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for column in made.values():
        for piece in column.pieces:
            yield _bytes(piece)


def read_columns(data: bytes | memoryview) -> dict[str, ColumnData]:
    """Returns the columns of a file, by name.

    Raises:
        ColumnError: It is none, or is cut short.
    """
    view = memoryview(data)
    if len(view) < 8:
        raise ColumnError(f"has {len(view)} bytes, and its header alone needs 8")
    length = int.from_bytes(view[:8], "little")
    if not 2 <= length <= min(_LONGEST_HEADER, len(view) - 8):
        raise ColumnError(f"has a header of {length} bytes, in a file of {len(view)}")
    try:
        header: Any = json.loads(bytes(view[8 : 8 + length]))
        slots = {name: _slot(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ColumnError(f"has a header that can't be read: {error}") from None
    raw = view[8 + length :]
    at = 0
    for name, slot in sorted(slots.items(), key=lambda item: item[1].start):
        if slot.start != at:
            raise ColumnError(f"has {name!r} at byte {slot.start}, not at {at}")
        at = slot.stop
    if at != len(raw):
        raise ColumnError(f"has {len(raw)} bytes of columns, and the header says {at}")
    return {name: _column(slot, raw) for name, slot in slots.items()}


def _slot(entry: Mapping[str, Any]) -> _Slot:
    code = _CODES[entry["dtype"]]
    (count,) = entry["shape"]
    start, stop = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (count, start, stop)):
        raise ValueError(f"{entry} holds what is no whole number")
    if stop - start != count * array(code).itemsize:
        raise ValueError(f"{entry} has a shape that is not its size")
    return _Slot(code, start, stop)


def _column(slot: _Slot, raw: memoryview) -> ColumnData:
    column = cast("ColumnData", array(slot.code))
    column.frombytes(raw[slot.start : slot.stop])
    return _little(column)


def _bytes(piece: ColumnData | memoryview[Any]) -> memoryview:
    view = memoryview(piece)
    if sys.byteorder != "little":
        view = memoryview(_little(array(view.format, view)))
    return view.cast("B")


def _little(column: ColumnData) -> ColumnData:
    """Turns a column's bytes round where the machine stores numbers the other way."""
    if sys.byteorder != "little":
        column.byteswap()
    return column
