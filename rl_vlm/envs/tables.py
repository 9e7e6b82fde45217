"""Tables of files from elsewhere that pyarrow reads whole or by the batch, each within a budget of memory."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv

from rl_vlm.envs.parquet import FREE_BYTES, READ_ERRORS
from rl_vlm.safe_text import one_line
from rl_vlm.types import UserInputError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (".jsonl", ".json", *DELIMITERS, ".arrow")  # beside .parquet
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# Folders that programs make beside those of people; hidden ones begin with a dot.
_NO_CLASSES = ("__MACOSX", "__pycache__", "@eaDir", "$RECYCLE.BIN", "lost+found")
# What a file begins with that is something else than its name says.
_OTHERS = {
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself: run `git lfs pull`",
    b"PK\x03\x04": "a ZIP archive, whatever its name: unpack it first",
    b"\x1f\x8b": "compressed by gzip: name it so, with the suffix .gz",
    b"\xfd7zXZ": "compressed by xz: unpack it first",
    b"<!DOCTYPE": "a web page and not the data: fetch the file itself",
    b"<html": "a web page and not the data: fetch the file itself",
}


def suffix_of(path: Path) -> str:
    """What a file is by its name, without the suffix of its compression."""
    return Path(path.name.lower().removesuffix(path.suffix.lower() if path.suffix.lower() in COMPRESSED else "")).suffix


def check_kind(file: Path) -> None:
    """Raise UserInputError for a file that is none of the kinds that are read, or only stands for one."""
    with file.open("rb") as opened:
        head = opened.read(32)
    suffix, packed = suffix_of(file), file.suffix.lower() in COMPRESSED
    if suffix not in (*SUFFIXES, ".parquet") and not head.startswith(b"PAR1"):
        kind = f"a {file.suffix} file" if file.suffix else "a file without a suffix"
        raise UserInputError(f"{file} is {kind}, which is not read: write one of {', '.join((*SUFFIXES, '.parquet'))}.")
    for mark, kind in _OTHERS.items():
        if head.startswith(mark) and not packed:
            raise UserInputError(f"{file} is {kind}.")
    if packed and suffix in (".parquet", ".arrow"):
        raise UserInputError(f"{file} is compressed as a whole: unpack it first.")


def unpacked(file: Path) -> bytes:
    """A file's content, of a compressed one what it holds. Raises UserInputError if it is larger than FREE_BYTES."""
    try:
        with pa.input_stream(str(file), compression=COMPRESSED.get(file.suffix.lower())) as stream:
            content = stream.read(FREE_BYTES + 1)
    except READ_ERRORS as error:
        raise UserInputError(f"{file} cannot be read ({one_line(error)}).") from error
    if len(content) > FREE_BYTES:
        raise UserInputError(f"{file} holds more than {FREE_BYTES >> 20} MiB: write it as parquet or plain JSON lines.")
    return bytes(content)


def text_table(file: Path) -> pa.Table:
    """A .csv or .tsv file with a line of names; all cells are texts. Raises UserInputError."""
    content, delimiter = unpacked(file), DELIMITERS[suffix_of(file)]
    try:
        lines = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")
        texts = dict.fromkeys(next(csv.reader(lines, delimiter=delimiter), ()), pa.string())
        return pa_csv.read_csv(
            pa.BufferReader(content),
            read_options=pa_csv.ReadOptions(block_size=max(len(content), 1)),  # a cell may be a whole picture
            parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(column_types=texts),
        )
    except (csv.Error, *READ_ERRORS) as error:
        raise UserInputError(
            f"{file} is not a readable {suffix_of(file)[1:].upper()} file ({one_line(error)})."
        ) from error


def image_classes(folder: Path) -> pa.Table:
    """The images of a folder whose subfolders are named by class: the columns `image` (a path) and `label`."""
    files = sorted(
        file
        for file in folder.glob("*/*")
        if file.suffix.lower() in IMAGE_SUFFIXES
        and not file.name.startswith(".")
        and not file.parent.name.startswith((".", *_NO_CLASSES))
    )
    return pa.table(
        {"image": [str(file.relative_to(folder)) for file in files], "label": [file.parent.name for file in files]}
    )


def arrow_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow file or stream, which stay on disk until they are used. Raises UserInputError."""
    try:
        source = pa.memory_map(str(file))
        start = 8 if source.read(6) == b"ARROW1" else 0  # a file is a stream between a mark and an index
        source.seek(start)
        if any(_is_compressed(message) for message in pa.ipc.MessageReader.open_stream(source)):
            raise UserInputError(f"{file} is a compressed Arrow file: write it as parquet.")  # sizes are unknown
        source.seek(start)
        yield from pa.ipc.open_stream(source)
    except READ_ERRORS as error:
        raise UserInputError(f"{file} is not a readable Arrow file ({one_line(error)}).") from error


def _is_compressed(message: pa.ipc.Message) -> bool:
    """Whether a batch says how its body is compressed: field 3 of its table in Arrow's Message.fbs, a flatbuffer."""
    data = message.metadata.to_pybytes()

    def number(place: int, size: int = 4) -> int:
        return int.from_bytes(data[place : place + size], "little", signed=size == 4)

    def field(table: int, index: int) -> int:
        """The place of a table's field, 0 if it is absent."""
        offsets = table - number(table)
        offset = number(offsets + 4 + 2 * index, 2) if 4 + 2 * index < number(offsets, 2) else 0
        return table + offset if offset else 0

    batch = field(number(0), 2)
    batch += number(batch)
    if message.type == "dictionary":  # which holds a batch
        batch = field(batch, 1)
        batch += number(batch)
    return message.type in ("record batch", "dictionary") and bool(field(batch, 3))
