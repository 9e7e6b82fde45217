"""Adapters, models, images and data files that were made to harm are refused when they are read, before they cost much."""

import base64
import io
import json
import pickle
import resource
import struct
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_corpus import memo_bomb, parquet_bomb, parquet_nulls
from image_corpus import chunk, encoded, jpeg_in_tiff, png, scan_bomb, sequential_bomb, with_segments
from PIL import Image, ImageOps
from safetensors.torch import save
from torch import float8_e4m3fn, zeros
from transformers import AutoConfig, AutoModelForImageTextToText

from rl_vlm.config import HTTPSection, TrainedModelSection
from rl_vlm.envs import images
from rl_vlm.envs import rows as row_files
from rl_vlm.envs.images import BadImageError, check_parts
from rl_vlm.envs.questions import QUESTIONS
from rl_vlm.envs.rows import BadRowError, file_rows
from rl_vlm.http.reader import RequestReader
from rl_vlm.labelling.import_labels import import_labels
from rl_vlm.labelling.labels import Label, Segment, SegmentPair
from rl_vlm.labelling.store import LabelStore
from rl_vlm.models.families.qwen_vl import ImageProcessorSpec
from rl_vlm.models.modules import from_folder
from rl_vlm.models.trained import initial_adapter, trained_folder
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.types import EncodedImage, UserInputError

GOOD = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def adapter(folder, tensors=None, text=None, **changes):
    folder.mkdir(exist_ok=True)
    name = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    data = save({name: zeros(4, 8)} if tensors is None else tensors)
    (folder / "adapter_model.safetensors").write_bytes(data)
    (folder / "adapter_config.json").write_text(text if text is not None else json.dumps({**GOOD, **changes}))
    return folder


@pytest.mark.parametrize(
    "changes, what",
    [
        *[({"r": rank}, "r: ") for rank in (0, -1, 1.5, True, None, 10**40)],
        *[({"lora_alpha": alpha}, "lora_alpha: ") for alpha in (float("inf"), float("nan"), "8", 10**400)],
        *[({"peft_type": kind}, "LORA") for kind in ("PROMPT_TUNING", ["LORA"])],
        *[({"tensors": tensors}, "only LoRA|holds no tensors") for tensors in ({}, {"embeddings": zeros(2, 8)})],
        ({"tensors": {"a.lora_A.weight": zeros(2, 8).to(float8_e4m3fn)}}, "F8_E4M3"),
        *[({"text": text}, "adapter_config") for text in ("[]", "[" * 100_000, "{", " " * (5 * 2**20))],
    ],
)
def test_what_is_no_lora_adapter_is_refused_when_it_is_read(changes, what, tmp_path):
    with pytest.raises(UserInputError, match=what) as caught:
        AdapterPayload.read(adapter(tmp_path / "a", **changes), 1)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "changes", [{}, {"lora_alpha": 8.5}, {"r": 256, "lora_alpha": 0}, {"target_modules": ".*q_proj"}]
)
def test_lora_adapters_are_read_as_before(changes, tmp_path):
    assert AdapterPayload.read(adapter(tmp_path / "a", **changes), 3).version == 3
    assert trained_folder(tmp_path) == tmp_path / "a"  # as peft names the folder of an adapter with a name
    (tmp_path / "a/adapter_model.safetensors").rename(tmp_path / "a/adapter_model.bin")
    with pytest.raises(UserInputError, match=r"its \.bin file with peft"):
        AdapterPayload.read(tmp_path / "a", 3)


def test_an_adapter_with_nan_is_refused_before_ray_starts(tmp_path):
    folder = adapter(tmp_path / "a", {"base_model.model.lm_head.lora_A.weight": zeros(4, 8) / 0})
    model = TrainedModelSection(path="tiny", adapter=str(folder))
    with pytest.raises(UserInputError, match="not finite"):
        initial_adapter(model)


def test_a_header_beyond_the_file_is_refused(tmp_path):
    folder = adapter(tmp_path / "a")
    for tensors in (b"", b"\xff" * 8, b"\xff" * 100, (2**40).to_bytes(8, "little") + b"{}"):
        (folder / "adapter_model.safetensors").write_bytes(tensors)
        with pytest.raises(UserInputError, match="holds no tensors|cannot be read"):
            AdapterPayload.read(folder, 1)


def test_a_model_with_code_of_its_own_is_refused_without_a_question(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    config = {
        "model_type": "evil",
        "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None], "AutoConfig": "evil.Config"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for auto in (AutoConfig, AutoModelForImageTextToText):
        with pytest.raises(UserInputError, match="code of its own"):
            from_folder(auto, tmp_path)
    assert not (tmp_path / "ran").exists()


# --- Images that cost more than they show are refused by every reader, before their pixels are decoded


SPEC = ImageProcessorSpec.from_config(
    {
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "min_pixels": 28 * 28,
        "max_pixels": 448 * 448,
    }
)


def http_reader(data, kind):
    uri = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return RequestReader(SimpleNamespace(images=SPEC), HTTPSection(), 10**6).images([uri])[0]


BOMBS = {
    "progressive": lambda: scan_bomb(64, 5500),
    "sequential": lambda: sequential_bomb(64, 5500),
    "components": lambda: scan_bomb(4096, 95, "RGB"),
    "comments": lambda: with_segments(encoded("JPEG"), b"\xff\xfe\0\2", 200_000),
    "fill": lambda: with_segments(encoded("JPEG"), b"\xff", 2**20),
    "chunks": lambda: png(8, 8, bytes(72), chunk(b"aaAa", b"") * 100_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_reader_decodes_a_picture_that_costs_more_than_it_shows(name, monkeypatch):
    data = BOMBS[name]()
    decoded = []
    monkeypatch.setattr(Image.Image, "load", lambda self: decoded.append(self))
    readers = [images.decode, images.pixels, images.check_header]
    for read in readers:
        with pytest.raises(BadImageError, match="scans|segments|chunks"):
            read(data)
    with pytest.raises(UserInputError, match="Image 1 .*(scans|segments|chunks)"):
        http_reader(data, "png" if name == "chunks" else "jpeg")
    assert not decoded


def test_ordinary_progressive_photos_are_read_as_before():
    # Sides that the processor leaves as they are: the server keeps a picture in the size that the model sees.
    pixels = np.random.default_rng(0).integers(0, 255, (112, 196, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    for options in ({}, {"progressive": True}, {"progressive": True, "subsampling": 0}, {"exif": exif}):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=90, **options)
        data = buffer.getvalue()
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert np.array_equal(images.pixels(data), np.asarray(expected))
        assert np.array_equal(np.asarray(http_reader(data, "jpeg").to_pil()), np.asarray(expected))


def test_scans_of_pictures_inside_the_picture_do_not_count():
    thumbnail = scan_bomb(16, 300)
    data = with_segments(encoded("JPEG", 64, progressive=True), b"", 0)
    segment = b"\xff\xe2" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    assert len(check_parts(with_segments(data, segment, 1))) == len(check_parts(data)) <= 12
    assert len(check_parts(data + thumbnail)) == len(
        check_parts(data)
    )  # behind the end, as in a phone's second picture


def test_jpegs_inside_a_tiff_are_refused():
    with pytest.raises(BadImageError, match="TIFF that holds JPEGs"):
        images.decode(jpeg_in_tiff())


@pytest.mark.parametrize(
    "data",
    [
        png(30_000, 30_000, bytes(100)),  # beyond what Pillow opens at all
        png(8, 8, bytes(5)),
        png(4, 4, bytes(20)),
        b"nonsense",
        b"",
    ],
)
def test_a_file_that_is_not_what_was_announced_is_the_users_error(data):
    with pytest.raises(UserInputError, match="^Image 0000 (cannot be decoded|has 4x4 pixels and was announced as 8x8)"):
        EncodedImage("0000", data, 8, 8).to_pil()


# --- Files that are small on the disk and large in memory are refused before the memory is gone


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@pytest.mark.slow
@pytest.mark.parametrize("bomb", [parquet_bomb, parquet_nulls])
def test_a_parquet_file_of_kilobytes_does_not_take_gigabytes(bomb, tmp_path):
    file = tmp_path / "train.parquet"
    file.write_bytes(bomb())
    assert file.stat().st_size < 2**20
    # In a process of its own, whose peak is that of the reader.
    program = f"""
        import resource
        from pathlib import Path
        from rl_vlm.envs.questions import QUESTIONS
        from rl_vlm.envs.rows import BadRowError, file_rows
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            file_rows([Path({str(file)!r})], QUESTIONS.columns).row(0)
        except BadRowError as error:
            print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    grown, message = done.stdout.split(" ", 1)
    assert int(grown) < 1024 and "the row group takes more than 256 MiB in memory" in message


def test_the_budget_grows_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "FREE_BYTES", 1000)
    rows = [{"problem": np.random.default_rng(n).bytes(500).hex(), "answer": "a", "images": []} for n in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert file_rows([tmp_path / "a.parquet"], QUESTIONS.columns).row(49)["answer"] == "a"
    same = [{"problem": "x" * 10_000, "answer": "a", "images": []} for _ in range(500)]
    pq.write_table(pa.Table.from_pylist(same), tmp_path / "b.parquet", compression="zstd")
    with pytest.raises(BadRowError, match="takes more than"):
        file_rows([tmp_path / "b.parquet"], QUESTIONS.columns).row(0)


def test_a_session_of_pictures_that_are_larger_than_their_files_is_refused(tmp_path):
    empty = np.zeros((1, 0), np.float32)
    part = Segment(empty, empty, np.ones(1, np.float32), np.zeros((1, 8, 8, 3), np.uint8))
    store = LabelStore(tmp_path)
    store.append([SegmentPair(part, part)] * 10, [Label(0)] * 10, step=0, time=0.0)
    (picture,) = (tmp_path / "images").iterdir()
    picture.write_bytes(png(8000, 7900, bytes(8001 * 7900)))  # 190 MB each time that it is named
    assert picture.stat().st_size < 100_000
    before = peak_mib()
    with pytest.raises(UserInputError, match="much larger than its file"):
        store.read(1)
    assert peak_mib() - before < 300


def bytes_bomb(opcode: bytes) -> bytes:
    """A pickle that says it holds 8 GiB of bytes."""
    return pickle.PROTO + b"\x05" + opcode + struct.pack("<Q", 2**33) + b"few" + pickle.STOP


def nested(depth: int, part: object) -> object:
    return part if depth == 0 else [nested(depth - 1, part)] * 50


def shared(part: object) -> bytes:
    """A cache whose lists hold one object 50 x 50 x 50 x 50 times."""
    parts = [np.zeros((2, 8, 16, 3), np.uint8), *[np.ones((2, 1))] * 2, *[np.zeros((2, 3, 5))] * 2, nested(4, part)]
    return pickle.dumps([*parts, np.zeros((2, 3))])


@pytest.mark.parametrize(
    "content",
    [
        memo_bomb(),
        bytes_bomb(pickle.BYTEARRAY8),
        bytes_bomb(pickle.BINBYTES8),
        bytes_bomb(pickle.FRAME),
        shared(np.zeros(1000)),
        pytest.param(shared([]), marks=pytest.mark.slow),
        shared("text" * 1000),
    ],
    ids=["memo", "bytearray", "bytes", "frame", "one array", "one list", "one text"],
)
def test_a_small_cache_cannot_take_gigabytes(tmp_path, content):
    (tmp_path / "a.pkl").write_bytes(content)
    before = peak_mib()
    with pytest.raises(UserInputError, match=r"a\.pkl"):
        import_labels(tmp_path, tmp_path / "store", observation_size=3)
    assert peak_mib() - before < 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pkl"]


def test_a_cache_that_takes_more_memory_than_its_size_explains_is_rejected(tmp_path, monkeypatch):
    for name in ("_FREE_MEMORY", "_MEMORY_PER_BYTE"):
        monkeypatch.setattr(f"rl_vlm.labelling.import_labels.{name}", 0)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([[0] * 2**20] * 7))
    with pytest.raises(UserInputError, match="takes more"):
        import_labels(tmp_path, tmp_path / "store", observation_size=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pkl"]


def test_a_pickle_of_nine_bytes_does_not_take_gigabytes(tmp_path):
    (tmp_path / "a.pkl").write_bytes(memo_bomb())
    assert (tmp_path / "a.pkl").stat().st_size == 9
    before = peak_mib()
    with pytest.raises(UserInputError, match=r"a\.pkl"):
        import_labels(tmp_path, tmp_path / "store", observation_size=3)
    assert peak_mib() - before < 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pkl"]
