"""Patches equal those of the Hugging Face image processor bit by bit, and bad images are named."""

from __future__ import annotations

import base64
import hashlib
import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from core_support import text_side
from http_support import data_uri, png_header
from PIL import Image
from transformers import AutoProcessor, Qwen2VLImageProcessor

from rl_vlm.config import HTTPSection
from rl_vlm.envs.images import pixels
from rl_vlm.http.reader import RequestReader
from rl_vlm.models.families.qwen_vl import ImageProcessorSpec, patchify
from rl_vlm.models.images import UnusableImageError
from rl_vlm.types import EncodedImage, UserInputError
from rl_vlm.zoo.tiny.model import build_processor

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, **HALF},
    "qwen3_vl, small": {"patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 16_384}, **HALF},
    "qwen2_5_vl": {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12_845_056},
}


def noise(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def assert_equal_patches(processor: Any, image: Image.Image) -> None:
    spec = ImageProcessorSpec.from_processor(processor)
    expected = processor(images=[image], return_tensors="pt")
    values, grid = patchify(spec, image)
    assert tuple(expected["image_grid_thw"][0].tolist()) == grid == spec.grid_thw(image.width, image.height)
    assert values.dtype == np.float32 and values.flags["C_CONTIGUOUS"]
    assert values.tobytes() == expected["pixel_values"].numpy().tobytes()


@pytest.mark.parametrize("name", CONFIGS)
def test_patches_equal_the_processors_for_any_size(name: str) -> None:
    processor = Qwen2VLImageProcessor(**CONFIGS[name])
    rng = np.random.default_rng(0)
    for _ in range(12):
        width, height = rng.integers(10, 300, size=2)
        assert_equal_patches(processor, noise(rng, int(width), int(height)))


@pytest.mark.parametrize("name", CONFIGS)
def test_patches_equal_the_processors_without_a_resize(name: str) -> None:
    processor = Qwen2VLImageProcessor(**CONFIGS[name])
    factor = processor.patch_size * 2
    rng = np.random.default_rng(1)
    least = 8 if name == "qwen3_vl" else 2
    for rows, columns in ((least, least), (least + 1, least), (least, least + 2)):
        image = noise(rng, columns * factor, rows * factor)
        spec = ImageProcessorSpec.from_processor(processor)
        assert spec.resized(image.width, image.height) == image.size
        assert_equal_patches(processor, image)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_other_colour_modes_are_converted_as_the_processor_does(mode: str) -> None:
    image = noise(np.random.default_rng(2), 64, 96).convert(mode)
    assert_equal_patches(Qwen2VLImageProcessor(**CONFIGS["qwen3_vl, small"]), image)


def test_image_tokens_are_the_processors_placeholders() -> None:
    processor = build_processor()
    spec = ImageProcessorSpec.from_processor(processor)
    rng = np.random.default_rng(4)
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    for _ in range(8):
        width, height = (int(side) for side in rng.integers(20, 400, size=2))
        ids = processor(text=[text], images=[noise(rng, width, height)])["input_ids"][0]
        assert spec.num_image_tokens(spec.grid_thw(width, height)) == ids.count(processor.image_token_id)


def test_a_saved_folder_gives_the_spec_of_its_processor(tmp_path: Path) -> None:
    build_processor().save_pretrained(tmp_path / "whole")
    Qwen2VLImageProcessor(**CONFIGS["qwen2_5_vl"]).save_pretrained(tmp_path / "part")
    whole = AutoProcessor.from_pretrained(tmp_path / "whole")
    assert ImageProcessorSpec.from_folder(tmp_path / "whole") == ImageProcessorSpec.from_processor(whole)
    part = Qwen2VLImageProcessor.from_pretrained(tmp_path / "part")
    assert ImageProcessorSpec.from_folder(tmp_path / "part") == ImageProcessorSpec.from_processor(part)


@pytest.mark.parametrize(
    ("size", "message"), [((1, 300), "200 times"), ((300, 1), "200 times"), ((0, 5), "empty"), ((5, 0), "empty")]
)
def test_an_impossible_size_is_an_error_that_names_the_image(size: tuple[int, int], message: str) -> None:
    spec = ImageProcessorSpec()
    calls: tuple[Callable[[], object], ...] = (
        lambda: patchify(spec, Image.new("RGB", size), name="row 17"),
        lambda: spec.grid_thw(*size, name="row 17"),
    )
    for call in calls:
        with pytest.raises(UnusableImageError):
            call()
    assert issubclass(UnusableImageError, UserInputError)


@pytest.mark.parametrize("png", [b"", b"not a png", EncodedImage.from_pil(Image.new("RGB", (64, 64), "red")).png[:60]])
def test_damaged_bytes_are_an_error_that_names_the_image(png: bytes) -> None:
    with pytest.raises(UnusableImageError):
        patchify(ImageProcessorSpec(), EncodedImage("abcdef0123456789", png, 64, 64))


def test_a_folder_without_a_processor_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="processor"):
        ImageProcessorSpec.from_folder(tmp_path)


# --- Images from data URIs: what is accepted arrives upright and in RGB, everything else is refused on its header


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 40, 3), dtype=np.uint8))
GRADIENT = Image.fromarray(np.arange(48 * 40 * 3, dtype=np.uint8).reshape(48, 40, 3))


@pytest.fixture(scope="module")
def spec(tiny_folder: Path) -> ImageProcessorSpec:
    return text_side(tiny_folder).images


def read(spec: ImageProcessorSpec, uri: str, **limits: Any) -> np.ndarray:
    return np.asarray(decoded(spec, uri, **limits).to_pil())


def decoded(spec: ImageProcessorSpec, uri: str, **limits: Any) -> EncodedImage:
    text: Any = SimpleNamespace(images=spec)
    return RequestReader(text, HTTPSection(**limits), 10**6).images([uri])[0]


def refusal(spec: ImageProcessorSpec, uri: str, **limits: Any) -> str:
    with pytest.raises(UserInputError) as caught:
        read(spec, uri, **limits)
    return str(caught.value)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(spec: ImageProcessorSpec, orientation: int) -> None:
    # What a camera stores for GRADIENT held in each of the eight ways (EXIF 2.3, tag 0x0112).
    stored = {
        1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a), 7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: lambda a: np.rot90(a, -1),
    }[orientation](np.asarray(GRADIENT))  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    uri = data_uri(Image.fromarray(np.ascontiguousarray(stored)), "png", exif=exif)
    assert np.array_equal(read(spec, uri), np.asarray(GRADIENT))


@pytest.mark.parametrize(("kind", "tolerance"), [("png", 0), ("webp", 0), ("jpeg", 24)])
def test_the_bytes_say_what_an_image_is_and_not_its_media_type(
    spec: ImageProcessorSpec, kind: str, tolerance: int
) -> None:
    smooth = Image.linear_gradient("L").resize((40, 48)).convert("RGB")
    options = {"lossless": True} if kind == "webp" else {}
    pixels = read(spec, data_uri(smooth, kind, mime="image/x-unknown", **options))
    assert np.abs(pixels.astype(int) - np.asarray(smooth)).max() <= tolerance


def test_a_plain_png_is_handed_on_as_it_is(spec: ImageProcessorSpec) -> None:
    uri = data_uri(NOISE, compress_level=9)
    sent = base64.b64decode(uri.partition(",")[2])
    assert decoded(spec, uri).png == sent
    assert decoded(spec, uri).sha256 == hashlib.sha256(sent).hexdigest()
    frames = {"save_all": True, "append_images": [GRADIENT]}
    for other, options in ((NOISE.convert("RGBA"), {}), (NOISE, {"transparency": (0, 0, 0)}), (NOISE, frames)):
        image = decoded(spec, data_uri(other, **options))
        assert image.png == EncodedImage.from_pil(image.to_pil()).png  # what encoding makes of it


def test_a_decompression_bomb_is_refused_before_it_is_decoded(spec: ImageProcessorSpec) -> None:
    for size in ((50_000, 50_000), (12_000, 9_000), (5_000, 4_000)):  # beyond PIL's error, its warning, and our limit
        tracemalloc.start()
        message = refusal(spec, data_uri(png_header(*size)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert "pixels, more than" in message or "more than 16777216 pixels" in message
        assert peak < 2**20


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("file:///etc/passwd", "data URI"),
        ("/etc/passwd", "data URI"),
        ("http://169.254.169.254/latest/meta-data", "data URI"),
        ("https://example.com/a.png", "data URI"),
        ("", "data URI"),
        ("data:image/png;base64", "data URI"),
        ("data:image/png,abc", "without ;base64"),
        ("data:;base64,AAAA", "not a readable image"),
        (data_uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", mime="image/svg+xml"), "not a readable image"),
        (data_uri(GRADIENT, "bmp", mime="image/png"), "not a readable image"),
        (data_uri(NOISE)[:-400], "cannot be decoded"),
        (data_uri(GRADIENT) + "é", "invalid base64"),
        ("data:image/png;base64,", "not a readable image"),
        ("data:image/png;base64,%%%%", "invalid base64"),
        (data_uri(png_header(0, 0)), "not a readable image|empty"),
        (data_uri(png_header(0, 64)), "not a readable image|empty"),
        (data_uri(png_header(64, 64)), "cannot be decoded"),
        (data_uri(Image.new("RGB", (1000, 1))), "longer than wide"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_everything_else_is_refused(spec: ImageProcessorSpec, uri: str, reason: str) -> None:
    message = refusal(spec, uri)
    assert any(part in message for part in reason.split("|")), message
    assert message.startswith("Image 1") and "Traceback" not in message


def test_a_file_over_the_limit_is_refused_undecoded(spec: ImageProcessorSpec) -> None:
    uri = "data:image/png;base64," + base64.b64encode(bytes(2**20)).decode()
    assert "larger than 0.5 MiB" in refusal(spec, uri, max_image_mib=0.5)
    assert "larger" not in refusal(spec, uri, max_image_mib=1)


# --- One function makes any picture RGB as a viewer shows it, wherever it comes from

CLEAR = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
CLEAR.putpixel((0, 0), (0, 0, 255, 255))
WHITE = (255, 255, 255)


def turned_photo() -> Image.Image:
    """A photo of 96x64 pixels as a camera stores it that was held upright, opened and not decoded."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    stored = Image.new("RGB", (96, 64), "white")
    stored.paste("red", (0, 0, 16, 64))  # on the left of the sensor: at the top for a viewer
    stored.save(file, "PNG", exif=exif)
    return Image.open(file)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (CLEAR, WHITE),
        (CLEAR.quantize(4), WHITE),  # a palette with alpha
        (CLEAR.convert("RGBa"), WHITE),
        (Image.new("LA", (8, 8), (0, 0)).convert("La"), WHITE),
        (Image.new("LA", (8, 8), (0, 0)), WHITE),
        (Image.new("RGBA", (8, 8), (0, 0, 0, 128)), (127, 127, 127)),
        (Image.fromarray(np.full((8, 8), 40000, np.uint16)), (156, 156, 156)),
        (Image.new("L", (8, 8), 7), (7, 7, 7)),
        (Image.new("1", (8, 8), 1), WHITE),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else "",
)
def test_every_mode_is_shown_as_a_viewer_shows_it(image: Image.Image, expected: tuple[int, int, int]) -> None:
    assert EncodedImage.from_pil(image).to_pil().getpixel((7, 7)) == expected
    if image.mode not in ("RGBa", "La"):  # which no file has
        file = io.BytesIO()
        image.save(file, "PNG")
        assert tuple(pixels(file.getvalue())[7, 7]) == expected


def test_the_model_sees_a_photo_upright_with_the_grid_of_what_it_sees(spec: ImageProcessorSpec) -> None:
    patches, grid = patchify(spec, turned_photo())
    expected, expected_grid = patchify(spec, EncodedImage.from_pil(turned_photo()))
    assert grid == expected_grid and np.array_equal(patches, expected)
