"""Images that cost more than they show are refused by every reader, before their pixels are decoded."""

import base64
import io
import random

import numpy as np
import pytest
from image_corpus import chunk, encoded, jpeg_in_tiff, png, scan_bomb, sequential_bomb, with_segments
from PIL import Image, ImageOps

from rl_vlm.config import HTTPSection
from rl_vlm.envs import images
from rl_vlm.envs.images import ImageError, check_parts
from rl_vlm.http.reader import ImageReader
from rl_vlm.models.images import ImageProcessorSpec
from rl_vlm.types import EncodedImage, UserInputError

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
    reader = ImageReader(HTTPSection(), SPEC)
    return reader.decode(reader.open(uri, "0"), "0")


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
        with pytest.raises(ImageError, match="scans|segments|chunks"):
            read(data)
    with pytest.raises(UserInputError, match="Image 0 .*(scans|segments|chunks)"):
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
    with pytest.raises(ImageError, match="TIFF that holds JPEGs"):
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


def test_random_parts_do_not_break_the_look_at_the_parts():
    random.seed(0)
    files = [encoded("JPEG", 32, progressive=True), encoded("PNG", 32), scan_bomb(32, 3)]
    for _ in range(2000):
        data = bytearray(random.choice(files))
        for _ in range(random.randint(1, 8)):
            data[random.randrange(len(data))] = random.choice([0, 0xFF, 0xD8, 0xDA, 0xD9, random.randrange(256)])
        try:
            assert all(1 <= components <= 4 for components in check_parts(bytes(data)))
        except ImageError:
            pass
