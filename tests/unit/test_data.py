"""Question sets: sources, slices, image forms, and what a bad row says."""

import ast
import base64
import decimal
import gzip
import io
import struct
import zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rl_vlm.envs.data import DataTable, open_table
from rl_vlm.envs.questions import QUESTIONS, ImageQuestion
from rl_vlm.envs.rows import BadRowError
from rl_vlm.types import UserInputError

GEO3K = Path(__file__).parents[1] / "fixtures" / "geo3k"
PARTS = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def png(color="red", size=(3, 2), kind="PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, format=kind)
    return buffer.getvalue()


def uri(data: bytes, media_type="image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def bomb(width: int, height: int) -> bytes:
    """A PNG header that promises many pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100)
    chunk = struct.pack(">I", len(data)) + b"IDAT" + data + struct.pack(">I", zlib.crc32(b"IDAT" + data))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + chunk


def write(file: Path, images, problem="<image>What?", answer="5", kind=None, **options) -> Path:
    rows = len(images)
    columns = {
        "problem": [problem] * rows if isinstance(problem, str) else problem,
        "answer": [answer] * rows if isinstance(answer, str) else answer,
        "images": pa.array(images, type=kind) if kind is not None else images,
    }
    pq.write_table(pa.table(columns), file, **options)
    return file


def one(tmp_path, images, **columns) -> DataTable[ImageQuestion]:
    """A table of one row."""
    return open_table(QUESTIONS, str(write(tmp_path / "train.parquet", [images], **columns)), "train")


def test_folder_file_and_shards_hold_the_same_questions(tmp_path):
    table = pq.read_table(GEO3K / "train.parquet")
    (tmp_path / "data").mkdir()
    pq.write_table(table.slice(0, 5), tmp_path / "data" / "train-00000-of-00002.parquet")
    pq.write_table(table.slice(5), tmp_path / "data" / "train-00001-of-00002.parquet")
    folder = open_table(QUESTIONS, str(GEO3K), "train")
    file = open_table(QUESTIONS, str(GEO3K / "train.parquet"), "train")
    shards = open_table(QUESTIONS, str(tmp_path), "train")
    assert len(folder) == len(file) == len(shards) == 8
    for i in range(8):
        assert folder[i].answer == file[i].answer == shards[i].answer
        assert folder[i].images == shards[i].images
    assert shards[6].where.endswith("train-00001-of-00002.parquet, row 1")


@pytest.mark.parametrize(
    "suffix", ["0:3", "2:4", ":2", "6:", "-2:", "5:99", "8:", "3:3", "5:2", "a:b", "1", "1:2:3", ""]
)
def test_slices_select_rows_and_none_is_an_error(suffix):
    ends = [int(end) if end.lstrip("-").isdigit() else end or None for end in suffix.split(":")]
    well_formed = len(ends) == 2 and "a" not in ends
    rows = range(8)[slice(*ends)] if well_formed else ()
    whole = open_table(QUESTIONS, str(GEO3K), "train")
    with nullcontext() if rows else pytest.raises(UserInputError, match="8 rows" if well_formed else "written @"):
        part = open_table(QUESTIONS, f"{GEO3K}@[{suffix}]", "train")
        assert [part[i].where for i in range(len(part))] == [whole[i].where for i in rows]


def test_every_form_of_an_image_is_read(tmp_path):
    data = png()
    text = base64.b64encode(data).decode().rstrip("=")
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.png").write_bytes(data)
    forms = {
        "bytes": ([[{"bytes": data, "path": None}]], PARTS),
        "struct path": ([[{"bytes": None, "path": "figures/a.png"}]], PARTS),
        "raw": ([[data]], pa.list_(pa.binary())),
        "path": ([["figures/a.png"]], None),
        "data uri": ([[uri(data)]], None),
        "malformed data uri": ([[uri(data, "image/None")]], None),
        "unpadded, wrapped data uri": ([["data:;base64," + text[:8] + "\n" + text[8:]]], None),
        "not a list": ([data], pa.binary()),
    }
    for name, (images, kind) in forms.items():
        table = open_table(QUESTIONS, str(write(tmp_path / f"{name}.parquet", images, kind=kind)), "train")
        assert table.validate() == 1, name
        assert table[0].images[0].to_pil().getpixel((0, 0)) == (255, 0, 0), name


def test_images_stand_where_their_markers_are_and_first_without_markers(tmp_path):
    marked = one(tmp_path, [png("red"), png("blue")], problem="A <image> B <image>")[0]
    assert marked.parts() == ("A ", marked.images[0], " B ", marked.images[1])
    question = one(tmp_path, [png("red"), png("blue")], problem="Which?")[0]
    assert question.parts() == (*question.images, "Which?")


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (pa.array([2.5]), "2.5"),
        (pa.array([5.0]), "5"),
        (pa.array([0.1 + 0.2]), "0.3"),
        (pa.array([0.1], pa.float32()), "0.1"),
        (pa.array([1234.567], pa.float32()), "1234.567"),
        (pa.array([np.float16(0.1)]), "0.1"),
        (pa.array([decimal.Decimal("5.50")]), "5.50"),
        (pa.array([123456789]), "123456789"),
        (pa.array([" \\boxed{5} "]), "5"),
        (pa.array(["2+3\n#### 5"]), "5"),
    ],
    ids=str,
)
def test_an_answer_is_the_bare_value_as_it_was_meant(tmp_path, answer, truth):
    table = open_table(QUESTIONS, str(write(tmp_path / "a.parquet", [[png()]], answer=answer)), "train")
    assert table[0].answer == truth


@pytest.mark.parametrize("answer", ["It is 5.\nOr is it?", "7" * 1001, "$$\\boxed{}$$\n5", "<answer></answer>"])
def test_a_truth_that_nobody_can_give_is_named(tmp_path, answer):
    table = open_table(QUESTIONS, str(write(tmp_path / "train.parquet", [[png()]], answer=[answer])), "train")
    with pytest.raises(BadRowError, match="row 0"):
        table.validate()


def test_truths_that_only_their_own_text_answers_are_counted(tmp_path, caplog):
    answers = ["5", "It comes to 5", "Yes, 5"]
    open_table(QUESTIONS, str(write(tmp_path / "train.parquet", [[png()]] * 3, answer=answers)), "train").validate()
    assert "2 of 3 rows" in caplog.text and "row 1, where only an answer that repeats 'It comes to 5'" in caplog.text


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([b"not an image"], "image 0 is not a readable image"),
        ([b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"], "is not a readable image"),
        ([b""], "image 0 has neither bytes nor a path"),
        ([bomb(20_000, 20_000)], "more than 64000000"),
        ([bomb(9_000, 9_000)], "has 9000x9000 pixels, more than 64000000"),
        ([bomb(1, 300)], "1x300 pixels, more than 200 times longer than wide"),
        (["missing.png"], "there is no such file"),
        (["How many?"], "looks like a text: name the column"),
        (["../secret.png"], "leaves the folder"),
        (["/etc/passwd"], "leaves the folder"),
        (["a\0b"], "cannot be read"),
        (["."], "there is no such file"),
        (["http://localhost/a.png"], "never fetched"),
        (["s3://bucket/a.png"], "never fetched"),
        (["file:///etc/passwd"], "leaves the folder"),
        (["data:image/png,abc"], "without ;base64"),
        (["data:image/png;base64,@@@"], "invalid base64"),
        ([], "1 <image> markers in the problem, 0 images"),
        ([png(), png()], "1 <image> markers in the problem, 2 images"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bad_image_names_file_row_and_reason(tmp_path, images, message):
    good = uri(png()) if images and isinstance(images[0], str) else png()
    table = open_table(QUESTIONS, str(write(tmp_path / "train.parquet", [[good], images])), "train")
    for check in (lambda: table[1], lambda: table.validate()):
        with pytest.raises(BadRowError, match=message) as caught:
            check()
        assert "train.parquet, row 1" in str(caught.value)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "secret.png").write_bytes(png())
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.png").symlink_to(tmp_path / "secret.png")
    table = open_table(QUESTIONS, str(write(tmp_path / "set" / "train.parquet", [["a.png"]])), "train")
    with pytest.raises(BadRowError):
        table[0]


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int8(), pa.string())])
def test_a_compressed_arrow_file_is_rejected_because_its_size_in_memory_is_not_known(tmp_path, compression, kind):
    table = pa.table({name: pa.array(["a" * 9999] * 9, kind) for name in ("problem", "answer", "images")})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    for make in (pa.ipc.new_stream, pa.ipc.new_file):
        with make(str(tmp_path / "a.arrow"), table.schema, options=options) as writer:
            writer.write_table(table)
        with pytest.raises(UserInputError, match="a compressed Arrow file"):
            open_table(QUESTIONS, str(tmp_path / "a.arrow"), "train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.xlsx", b"PK\3\4", "a .xlsx file"),
        ("a.json", b"PK\3\4", "a ZIP archive"),
        ("a.json", b"[{}, {", "damaged at entry 1"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.jsonl.gz", gzip.compress(bytes(2**28 + 9), 1), "more than 256 MiB"),
        ("a.arrow", b"ARROW1\0\0", "not a readable Arrow file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_for_what_it_is(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserInputError, match=message):
        open_table(QUESTIONS, str(tmp_path / name), "train")


def test_a_truncated_image_is_found_when_it_is_used(tmp_path):
    data = png(size=(200, 200), kind="JPEG")
    table = one(tmp_path, [data[: len(data) // 2]])
    assert table.validate() == 1  # the header is fine, and validation decodes no pixels
    with pytest.raises(BadRowError):
        table[0]


@pytest.mark.parametrize(
    ("column", "value"),
    [("answer", None), ("answer", " "), ("answer", float("nan")), ("answer", ["5"]), ("problem", None), ("problem", 5)],
)
def test_a_row_without_text_is_rejected_and_a_number_is_text(tmp_path, column, value):
    columns = {"problem": ["What?"], "answer": ["5"], column: [value]}
    table = open_table(QUESTIONS, str(write(tmp_path / "a.parquet", [[png()]], **columns)), "train")
    with nullcontext() if value == 5 else pytest.raises(BadRowError):
        assert table[0].problem == "5"


@pytest.mark.parametrize("column", ["problem", "answer", "images", "note"])
def test_a_column_that_is_there_twice_is_rejected_where_it_is_read(tmp_path, column):
    table = pq.read_table(write(tmp_path / "a.parquet", [[png()]]))
    table = table.append_column("note", table["answer"])
    pq.write_table(table.append_column(column, table[column]), tmp_path / "train.parquet")
    with nullcontext() if column == "note" else pytest.raises(UserInputError, match=f"column {column}"):
        open_table(QUESTIONS, str(tmp_path), "train")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 200 + b"PAR1"])
def test_columns_splits_and_files_that_are_missing_are_named(tmp_path, content):
    pq.write_table(pa.table({"question": ["?"], "answer": ["5"]}), tmp_path / "train.parquet")
    for split, words in (("train", "problem, images"), ("test", "it holds train.parquet")):
        with pytest.raises(UserInputError, match=words):
            open_table(QUESTIONS, str(tmp_path), split)
    (tmp_path / "train.parquet").write_bytes(content)
    with pytest.raises(UserInputError, match="not a readable parquet file"):
        open_table(QUESTIONS, str(tmp_path), "train")


def test_a_damaged_row_group_is_found_up_front_and_spares_the_others(tmp_path):
    rows = [[png(size=(i + 1, 50))] for i in range(8)]
    file = write(tmp_path / "train.parquet", rows, row_group_size=4, write_page_checksum=True)
    column = pq.ParquetFile(file).metadata.row_group(1).column(2)
    start = column.dictionary_page_offset or column.data_page_offset
    content = bytearray(file.read_bytes())
    middle = start + column.total_compressed_size // 2
    content[middle : middle + 20] = bytes(byte ^ 0xFF for byte in content[middle : middle + 20])
    file.write_bytes(content)
    table = open_table(QUESTIONS, str(tmp_path), "train")
    with pytest.raises(UserInputError, match="row 4"):
        table.validate(limit=4)
    assert table[3].answer == "5"


def test_validation_checks_rows_spread_over_the_table(tmp_path):
    images = [[png()]] * 9 + [[b"x"]]
    table = open_table(QUESTIONS, str(write(tmp_path / "a.parquet", images)), "train")
    assert table.validate(limit=3) == 3
    with pytest.raises(BadRowError):
        table.validate()
    assert open_table(QUESTIONS, str(GEO3K), "train").validate() == 8


def test_environments_share_a_table_until_its_file_changes(tmp_path):
    file = write(tmp_path / "train.parquet", [[png()]])
    first = open_table(QUESTIONS, str(tmp_path), "train")
    assert open_table(QUESTIONS, str(tmp_path), "train") is first
    write(file, [[png()], [png()]])
    assert len(open_table(QUESTIONS, str(tmp_path), "train")) == 2


def test_every_picture_is_opened_with_named_formats():
    """Without them Pillow would hand PostScript to Ghostscript, whatever the file is called."""
    package = Path(__file__).parents[2] / "rl_vlm"
    opened = [
        (file.name, {keyword.arg for keyword in node.keywords})
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Image.open", "PIL.Image.open")
    ]
    assert opened and all("formats" in keywords for _, keywords in opened), opened
