"""Packed columns on disk: any safetensors reader opens them, and damage is seen."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollnest._columns import ColumnData, ColumnError, read_columns, write_columns

int32 = st.integers(-(2**31), 2**31 - 1)
pieces = st.one_of(
    st.lists(st.lists(int32, max_size=5).map(lambda v: array("i", v)), max_size=3),
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False), max_size=5).map(lambda v: array("f", v)),
        max_size=3,
    ),
    st.lists(
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(lambda v: array("q", v)),
        max_size=3,
    ),
)


def written(columns: dict[str, list[ColumnData]]) -> bytes:
    return b"".join(write_columns(columns))


@given(st.dictionaries(st.text(max_size=4), pieces, max_size=4))
def test_what_was_written_is_read(columns: dict[str, list[ColumnData]]) -> None:
    columns.pop("__metadata__", None)
    read = read_columns(written(columns))
    assert read.keys() == {name for name, column in columns.items() if column}
    for name, column in read.items():
        assert column.tolist() == [value for piece in columns[name] for value in piece]
        assert column.typecode == columns[name][0].typecode


def test_safetensors_reads_it() -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    columns: dict[str, list[ColumnData]] = {
        "ids": [array("i", [1, 2]), array("i", [3])],
        "logprobs": [array("f", [-0.5, -1.5])],
        "stops": [array("q", [2**40])],
    }
    read = numpy.load(written(columns))
    assert {name: (str(a.dtype), a.tolist()) for name, a in read.items()} == {
        "ids": ("int32", [1, 2, 3]),
        "logprobs": ("float32", [-0.5, -1.5]),
        "stops": ("int64", [2**40]),
    }


GOOD = written({"ids": [array("i", [1, 2, 3])], "logprobs": [array("f", [-1.0])]})


@given(st.integers(0, len(GOOD) - 1))
def test_a_file_that_is_cut_short_is_seen(length: int) -> None:
    with pytest.raises(ColumnError, match="has"):
        read_columns(GOOD[:length])


def test_a_longer_file_is_seen() -> None:
    with pytest.raises(ColumnError, match="17 bytes of columns, and the header says 16"):
        read_columns(GOOD + b"\0")


@given(st.integers(0, len(GOOD) - 17), st.integers(0, 255))
def test_a_damaged_header_gives_columns_or_says_so(at: int, byte: int) -> None:
    damaged = bytearray(GOOD)
    damaged[at] = byte
    try:
        read = read_columns(bytes(damaged))
    except ColumnError:
        return
    assert sum(len(column) for column in read.values()) == 4  # a name or a type, no length


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}, "F16"),
        ({"dtype": "I32", "shape": [2], "data_offsets": [0, 4]}, "not its size"),
        ({"dtype": "I32", "shape": [1, 1], "data_offsets": [0, 4]}, "can't be read"),
        ({"dtype": "I32", "shape": [-1], "data_offsets": [0, -4]}, "no whole number"),
        ({"dtype": "I32", "shape": [1], "data_offsets": [4, 8]}, "at byte 4, not at 0"),
        ({"dtype": "I32", "shape": [1]}, "can't be read"),
        (7, "can't be read"),
    ],
)
def test_a_wrong_header_is_seen(entry: object, said: str) -> None:
    header = json.dumps({"ids": entry}).encode()
    with pytest.raises(ColumnError, match=said):
        read_columns(len(header).to_bytes(8, "little") + header + bytes(4))
