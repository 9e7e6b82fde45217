"""Reads parquet files with a limit of memory: a file of kilobytes may promise, and give, gigabytes."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from rl_vlm.types import UserInputError

FREE_BYTES = 256 * 2**20  # that a row group may take whatever its size in the file
MAX_BYTES = 2**31  # that it may take at most
MAX_RATIO = 100  # bytes in memory for a byte of the file; pictures have 1, tables of text up to 30
_FEWEST_ROWS, _MOST_ROWS = 64, 65_536  # that are read at once


class TooLargeError(UserInputError):
    """A part of a file is larger in memory than its budget."""


def read_row_group(
    reader: pq.ParquetFile, group: int, columns: Sequence[str] | None = None, free_bytes: int = FREE_BYTES
) -> pa.Table:
    """A row group as a table, with the file's own metadata. Raises TooLargeError, and pyarrow's errors for damaged files.

    The group is read piece by piece, because a file may lie about its size: one value of a dictionary may stand in
    millions of rows.
    """
    metadata = reader.metadata.row_group(group)
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    if columns is not None:
        chunks = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]
    budget = min(MAX_BYTES, max(free_bytes, MAX_RATIO * sum(chunk.total_compressed_size for chunk in chunks)))
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    _check(max(size, 4 * sum(chunk.num_values for chunk in chunks)), budget)
    rows = min(max(budget // max(size, 1), _FEWEST_ROWS), _MOST_ROWS)  # whose values can hardly exceed the budget
    batches, held = [], 0
    for batch in reader.iter_batches(batch_size=rows, row_groups=[group], columns=columns, use_threads=False):
        held += batch.nbytes
        _check(held, budget)
        batches.append(batch)
    schema = reader.schema_arrow
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in schema.names if name in columns], schema.metadata)
    return pa.Table.from_batches(batches, batches[0].schema if batches else schema)


def read_file(reader: pq.ParquetFile, free_bytes: int = FREE_BYTES) -> pa.Table:
    """All row groups of a small file. Raises as `read_row_group`; the budget is one for the whole file."""
    tables, left = [], free_bytes
    for group in range(reader.num_row_groups):
        tables.append(read_row_group(reader, group, free_bytes=max(left, 0)))
        left -= tables[-1].nbytes
    return pa.concat_tables(tables) if tables else reader.schema_arrow.empty_table()


def _check(size: int, budget: int) -> None:
    if size > budget:
        raise TooLargeError(
            f"takes more than {budget >> 20} MiB in memory: write the file with smaller row groups (row_group_size)"
        )
