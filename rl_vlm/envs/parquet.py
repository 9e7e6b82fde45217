"""Parquet files from elsewhere, read within a budget of memory."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from rl_vlm.types import UserInputError

FREE_BYTES = 256 * 2**20  # that a read may take whatever the size of the file
MAX_BYTES = 2**31  # that a read may take at most
MAX_RATIO = 100  # bytes in memory for a byte of the file; pictures have 1, tables of text up to 30
_ROWS_AT_ONCE = 64
# What pyarrow raises on a damaged file: its own errors, the system's, and bad UTF-8 when a value becomes a string.
READ_ERRORS = (pa.ArrowException, OSError, ValueError)


class TooLargeError(UserInputError):
    """A part of a file is larger in memory than its budget.

    Do: write the file with smaller row groups (`row_group_size`).
    """


def read_parquet(
    reader: pq.ParquetFile, group: int | None = None, columns: Sequence[str] | None = None, free_bytes: int = FREE_BYTES
) -> pa.Table:
    """A row group, or the whole file, as a table. Raises TooLargeError, and pyarrow's errors for damaged files.

    The budget is `free_bytes`, or more for a larger file. The sizes that the file claims are compared with it first.
    Then the rows are read piece by piece, because a file may lie: one value of a dictionary may stand in millions of
    rows.
    """
    groups = list(range(reader.num_row_groups)) if group is None else [group]
    parts = [reader.metadata.row_group(number) for number in groups]
    chunks = [part.column(number) for part in parts for number in range(part.num_columns)]
    budget = min(MAX_BYTES, max(free_bytes, MAX_RATIO * sum(chunk.total_compressed_size for chunk in chunks)))
    sizes = [part.total_byte_size for part in parts] + [4 * chunk.num_values for chunk in chunks]
    batches: list[pa.RecordBatch] = []
    held, pieces = 0, reader.iter_batches(_ROWS_AT_ONCE, row_groups=groups, columns=columns, use_threads=False)
    while held <= budget and max(sizes, default=0) <= budget:
        batch = next(pieces, None)
        if batch is None:
            return pa.Table.from_batches(batches) if batches else reader.read_row_groups(groups, columns=columns)
        held += batch.nbytes
        batches.append(batch)
    raise TooLargeError(
        f"takes more than {budget >> 20} MiB in memory: write the file with smaller row groups (row_group_size)"
    )
