"""What is fuzzed: each target takes bytes, gives them to a reader, and raises where that does what it must not.

Hypothesis damages the seeds (test_fuzz_files.py), libFuzzer looks for bytes that reach new lines (guided.py).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from image_corpus import chunk, encoded, png, scan_bomb, sequential_bomb
from safetensors.torch import save
from torch import zeros

from rl_vlm import frames
from rl_vlm.config.yaml_text import load_yaml
from rl_vlm.envs import images, isolation
from rl_vlm.labelling.answers import read_label, read_score
from rl_vlm.labelling.query_log import text_cell
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.rewards.judged import quoted, why_not_judged
from rl_vlm.rewards.normalize import normalize_answer
from rl_vlm.safe_text import printable, safe, without_thoughts
from rl_vlm.types import EncodedImage, UserInputError
from rl_vlm.zoo.caption.grading import grade_caption
from rl_vlm.zoo.geospot.answers import parse_answer
from rl_vlm.zoo.nlvr2.verdicts import read_verdict
from rl_vlm.zoo.zoom.answers import read_answer

_LONGEST = 700  # of a message


class Target(NamedTuple):
    """A check of bytes, files to begin with, and words that such files are made of."""

    check: Callable[[bytes], None]
    seeds: Sequence[bytes]
    words: Sequence[str] = ()


def image(data: bytes) -> None:
    """A picture within its bounds, or a short refusal."""
    try:
        picture = images.decode(data, max_pixels=10**6)
        assert picture.width * picture.height <= 10**6
    except images.BadImageError as error:
        assert len(str(error)) < _LONGEST
    try:
        EncodedImage("0", data, 24, 24).to_pil()
    except UserInputError:
        pass


def frame(data: bytes) -> None:
    """A frame of an environment's observations."""
    try:
        content, blobs = frames.unpack_frame(data)
        shown = isolation.unpack_observation(content, blobs)
        assert all(part.width > 0 for one in shown.messages for part in one.parts if not isinstance(part, str))
    except frames.FrameError:
        pass


def adapter_config(data: bytes) -> None:
    """An adapter's adapter_config.json."""
    _adapter(data, TENSORS)


def adapter_tensors(data: bytes) -> None:
    """An adapter's adapter_model.safetensors."""
    _adapter(json.dumps(CONFIG).encode(), data)


_SCRATCH = tempfile.TemporaryDirectory()


def _adapter(config: bytes, tensors: bytes) -> None:
    folder = Path(_SCRATCH.name)
    (folder / AdapterPayload.CONFIG).write_bytes(config)
    try:
        AdapterPayload.checked(folder, lambda _: tensors)
    except UserInputError as error:
        assert len(str(error)) < _LONGEST


def yaml_text(data: bytes) -> None:
    """A configuration."""
    try:
        load_yaml(data.decode("utf-8", "replace"))
    except yaml.YAMLError:
        pass


def label(data: bytes) -> None:
    """A labeller's answer."""
    check_label(data.decode("utf-8", "surrogateescape"))


def check_label(text: str) -> None:
    """The same of its text."""
    assert read_label(text) in (0, 1, -1, None)
    score = read_score(text)
    assert score is None or -1 <= score <= 1
    assert len(without_thoughts(text)) <= len(text)
    assert printable(text_cell(text)) == text_cell(text)
    assert safe(safe(text)) == safe(text)


def answer(data: bytes) -> None:
    """A policy's answer, for the graders that are no processes of their own."""
    text = data.decode("utf-8", "replace")
    place = parse_answer(text)
    if place.coords is not None:
        assert -90 <= place.coords[0] <= 90 and -180 <= place.coords[1] <= 180
    assert 0 <= grade_caption(text, ["a red cube left of a sphere"]).f1 <= 1
    assert len(quoted(text, 100)) <= _LONGEST
    assert isinstance(why_not_judged(text, 100), str)
    assert normalize_answer(text) == normalize_answer(text)
    read_answer(text)
    read_verdict(text)


IMAGES = [
    encoded("PNG", 24),
    encoded("PNG", 24, "P"),
    encoded("JPEG", 24),
    encoded("JPEG", 24, progressive=True),
    encoded("WEBP", 24),
    encoded("GIF", 24, "P"),
    encoded("BMP", 24),
    encoded("TIFF", 24),
    encoded("TIFF", 24, compression="tiff_lzw"),
    scan_bomb(24, 20),
    sequential_bomb(24, 20),
    png(8, 8, bytes(72), chunk(b"eXIf", b"II*\0" + bytes(40))),
]
MESSAGES = [{"role": "user", "parts": ["hello", {"width": 24, "height": 24}]}]
FRAME = frames.pack_frame({"messages": MESSAGES, "info": {}}, [IMAGES[0]])
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}
TENSORS = save({"base_model.model.a.lora_A.weight": zeros(4, 8)})
YAML = [b"a: &x {b: [1, 2.5, null]}\nc: *x\nd: '2020-01-01'\ne: 2020-01-01\n<<: *x\n", b"- [a, {b: c}]\n- |\n  text\n"]
WORDS = [
    "image 1", "image 2", "is", "better", "not", "both", "0", "1", "-1", "<think>", "</think>", "\n", "**", "(", ")", "because",
    "the first", "left", "however,", "answer:", "{", "}", ".", "?", "’", "—", "１", "\x00", "so",
]  # fmt: skip
ANSWERS = [
    b"City: Paris\nRegion: x\nCountry: France\nLatitude: 48.86\nLongitude: 2.35 W",
    b"a red cube left of a sphere, and 3 cats.",
    rb"\boxed{\frac{1}{2}\text{ cm}^2}",
    b"Verdict: the first is better. <answer>true</answer>",
]
TARGETS = {
    "images": Target(image, IMAGES),
    "frames": Target(frame, [FRAME]),
    "adapter_config": Target(adapter_config, [json.dumps(CONFIG).encode()], list(CONFIG)),
    "adapter_tensors": Target(adapter_tensors, [TENSORS], ["dtype", "F32", "BF16", "shape", "data_offsets", "__metadata__"]),
    "yaml": Target(yaml_text, YAML, ["&a ", "*a", "<<: ", "!!", "---"]),
    "labels": Target(label, [b"Image 1 is better.", b"The answer is -1.", "1 – nicht".encode()], WORDS),
    "answers": Target(answer, ANSWERS, ["Latitude", "Longitude", "\\frac", "°", "<answer>", "Score", "not", "true"]),
}  # fmt: skip
