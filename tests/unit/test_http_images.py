"""Images from data URIs: what is accepted arrives upright and in RGB, everything else is refused on its header."""

from __future__ import annotations

import base64
import hashlib
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import text_side
from http_support import data_uri
from PIL import Image

from rl_vlm.config import HTTPSection
from rl_vlm.http.reader import ImageReader
from rl_vlm.models.images import ImageProcessorSpec
from rl_vlm.types import EncodedImage, UserInputError

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 40, 3), dtype=np.uint8))
GRADIENT = Image.fromarray(np.arange(48 * 40 * 3, dtype=np.uint8).reshape(48, 40, 3))


def png_header(width: int, height: int, depth: int = 8) -> bytes:
    """A PNG file of that size whose pixels are missing."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    pixels = b"IDAT" + zlib.compress(b"\0")
    chunks = [
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in (body, pixels)
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.fixture(scope="module")
def spec(tiny_folder: Path) -> ImageProcessorSpec:
    return text_side(tiny_folder).images


def read(spec: ImageProcessorSpec, uri: str, **limits: Any) -> np.ndarray:
    reader = ImageReader(HTTPSection(**limits), spec)
    return np.asarray(reader.decode(reader.open(uri, "1"), "1").to_pil())


def refusal(spec: ImageProcessorSpec, uri: str, **limits: Any) -> str:
    with pytest.raises(UserInputError) as caught:
        read(spec, uri, **limits)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "tolerance"), [("png", 0), ("webp", 0), ("jpeg", 24)])
def test_formats_arrive_as_they_were(spec: ImageProcessorSpec, kind: str, tolerance: int) -> None:
    smooth = Image.linear_gradient("L").resize((40, 48)).convert("RGB")
    options = {"lossless": True} if kind == "webp" else {}
    pixels = read(spec, data_uri(smooth, kind, **options))
    assert np.abs(pixels.astype(int) - np.asarray(smooth)).max() <= tolerance


@pytest.mark.parametrize(
    ("image", "kind", "expected"),
    [
        (Image.new("CMYK", (32, 32), (0, 255, 255, 0)), "jpeg", (255, 0, 0)),
        (Image.fromarray(np.full((32, 32), 0xC0FF, dtype=np.uint16)), "png", (0xC0, 0xC0, 0xC0)),
        (Image.new("RGBA", (32, 32), (0, 0, 0, 0)), "png", (255, 255, 255)),
    ],
    ids=["CMYK", "16 bits", "transparent"],
)
def test_every_mode_becomes_rgb(
    spec: ImageProcessorSpec, image: Image.Image, kind: str, expected: tuple[int, int, int]
) -> None:
    pixels = read(spec, data_uri(image, kind))
    assert np.abs(pixels.astype(int) - expected).max() <= (4 if kind == "jpeg" else 0)


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


@pytest.mark.parametrize("mime", ["image/jpeg", "image/webp", "application/octet-stream", "image/x-unknown", ""])
def test_the_bytes_say_what_an_image_is_and_not_its_media_type(spec: ImageProcessorSpec, mime: str) -> None:
    assert np.array_equal(read(spec, data_uri(GRADIENT, "png", mime=mime)), np.asarray(GRADIENT))


def test_a_plain_png_is_handed_on_as_it_is(spec: ImageProcessorSpec) -> None:
    reader = ImageReader(HTTPSection(), spec)

    def decoded(uri: str) -> EncodedImage:
        return reader.decode(reader.open(uri, "1"), "1")

    uri = data_uri(NOISE, compress_level=9)
    sent = base64.b64decode(uri.partition(",")[2])
    assert decoded(uri).png == sent
    assert decoded(uri).sha256 == hashlib.sha256(sent).hexdigest()
    frames = {"save_all": True, "append_images": [GRADIENT]}
    for other, options in ((NOISE.convert("RGBA"), {}), (NOISE, {"transparency": (0, 0, 0)}), (NOISE, frames)):
        image = decoded(data_uri(other, **options))
        assert image.png == EncodedImage.from_pil(image.to_pil()).png  # what encoding makes of it


def test_a_decompression_bomb_is_refused_before_it_is_decoded(spec: ImageProcessorSpec) -> None:
    for size in ((50_000, 50_000), (12_000, 9_000), (5_000, 4_000)):  # beyond PIL's error, its warning, and our limit
        tracemalloc.start()
        message = refusal(spec, data_uri(png_header(*size)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert "too many pixels" in message
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
        ("data:image/png,abc", "base64 data URI"),
        ("data:;base64,AAAA", "no PNG"),
        (data_uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", mime="image/svg+xml"), "no PNG"),
        (data_uri(GRADIENT, "bmp", mime="image/png"), "no PNG"),
        (data_uri(GRADIENT)[:-1], "cut off"),
        (data_uri(NOISE)[:-400], "damaged"),
        (data_uri(GRADIENT) + "é", "not valid base64"),
        ("data:image/png;base64,", "no PNG"),
        ("data:image/png;base64,%%%%", "not valid base64"),
        (data_uri(png_header(0, 0)), "no PNG|empty"),
        (data_uri(png_header(0, 64)), "no PNG|empty"),
        (data_uri(png_header(64, 64)), "damaged"),
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


def test_damaged_files_are_refused_in_one_sentence(spec: ImageProcessorSpec) -> None:
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    reader = ImageReader(HTTPSection(max_image_pixels=10_000), spec)
    accepted = 0
    for kind, options in (("png", {"exif": exif}), ("jpeg", {"exif": exif}), ("gif", {}), ("webp", {"exif": exif})):
        whole = bytearray(base64.b64decode(data_uri(GRADIENT, kind, **options).partition(",")[2]))
        for _ in range(150):
            broken = bytearray(whole)
            for place in rng.integers(0, len(broken), rng.integers(1, 6)):
                broken[place] = rng.integers(0, 256)
            uri = data_uri(bytes(broken), kind)
            try:
                reader.decode(reader.open(uri, "1"), "1")
                accepted += 1
            except UserInputError as error:
                assert str(error).startswith("Image 1")
    assert 0 < accepted < 600
