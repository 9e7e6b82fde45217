"""Data files that are small on the disk and large in memory, or damaged."""

from __future__ import annotations

import io
import pickle
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def parquet_bomb(rows: int = 3000, value: int = 2**20) -> bytes:
    """One long value in every row: the file's dictionary holds it once."""
    indices = pa.array(np.zeros(rows, np.int32))
    words = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * value]))
    fields = {"problem": words, "answer": words, "images": pa.array([[]] * rows, pa.list_(pa.binary()))}
    out = io.BytesIO()
    pq.write_table(pa.table(fields), out, compression="zstd", store_schema=False)  # read as text, not as a dictionary
    return out.getvalue()


def parquet_nulls(values: int = 200_000_000) -> bytes:
    """One row whose list has so many missing values, which take no space."""
    numbers = pa.nulls(values, pa.int8())
    images = pa.ListArray.from_arrays(pa.array([0, values], pa.int32()), numbers)
    out = io.BytesIO()
    pq.write_table(pa.table({"problem": ["p"], "answer": ["a"], "images": images}), out, compression="zstd")
    return out.getvalue()


def memo_bomb(place: int = 2**29) -> bytes:
    """A pickle of nine bytes that asks for a table of this many entries."""
    return pickle.PROTO + b"\x04" + pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", place) + pickle.STOP
