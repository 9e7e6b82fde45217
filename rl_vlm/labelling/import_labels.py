"""RL-VLM-F's label caches as a label store.

They are pickles, and a pickle may run code. This reader knows arrays of plain numbers, lists and scalars, and rejects
everything else: it looks names up in a fixed table of its own functions and never imports anything that a file names.
It is Python's own reader and not the one in C, which lets a file of nine bytes ask for a table of gigabytes.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from PIL import Image

from rl_vlm.files import replace_folder
from rl_vlm.labelling.labels import Label, LabelValue, Segment, SegmentPair
from rl_vlm.labelling.store import LabelStore
from rl_vlm.types import UserInputError

_KINDS = "biuf"  # booleans, integers, floats
# The original's caches hold raw pictures: they are as large in memory as on the disk, and ten times as large where
# segments of many steps repeat their picture.
_FREE_MEMORY, _MEMORY_PER_BYTE = 2**30, 64
_NUMBER_BYTES = 8  # at most, in an array that is made of a list


def import_labels(
    source: str | Path, target: str | Path, *, observation_size: int, image_size: int | None = None
) -> tuple[int, int]:
    """Convert every `*.pkl` of a folder (or one file) into sessions of a label store, which appears whole or not at
    all; returns (sessions, pairs).

    `observation_size` is the length of the observation in the cached rows; `image_size` resizes the pictures, as the
    original does. Raises UserInputError for a file that needs much more memory than its size, or holds anything else.
    """
    source, target = Path(source), Path(target).absolute()  # "." has no name
    files = sorted(source.glob("*.pkl")) if source.is_dir() else [source]
    if not files:
        below = sorted({str(file.parent) for file in source.glob("**/*.pkl")})
        elsewhere = f" They are in {', '.join(below[:5])}: give one of these." if below else ""
        raise UserInputError(f"There are no .pkl files in {source}.{elsewhere}")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserInputError(f"{target} exists and is no empty folder: choose another folder for the label store.")
    with replace_folder(target) as draft:
        store, total = LabelStore(draft), 0
        for file in files:
            pairs, labels = read_cache(file, observation_size, image_size)
            if pairs:
                store.append(pairs, labels, step=0, time=time.time())
            total += len(pairs)
        if not total:
            raise UserInputError(f"No session in {source} holds a pair: there is nothing to convert.")
        return len(store), total


def read_cache(
    file: str | Path, observation_size: int, image_size: int | None = None
) -> tuple[list[SegmentPair], list[Label]]:
    """The pairs and labels of one cached session; none where no pair was decided. Raises UserInputError."""
    try:
        return _parse(Path(file).read_bytes(), observation_size, image_size)
    except (UserInputError, OSError) as error:
        raise UserInputError(f"Cannot read the label cache {file}: {error}") from error
    except MemoryError as error:
        raise UserInputError(f"The label cache {file} takes more memory than there is.") from error
    except Exception as error:
        # A damaged pickle raises whatever its damaged instructions lead to.
        raise UserInputError(f"The label cache {file} is damaged ({type(error).__name__}: {error}).") from error


def _parse(content: bytes, observation_size: int, image_size: int | None) -> tuple[list[SegmentPair], list[Label]]:
    memory = _FREE_MEMORY + _MEMORY_PER_BYTE * len(content)

    def check(fits: bool, what: str) -> None:
        if not fits:
            raise UserInputError(f"it is no label cache of preferences: {what}.")

    def check_memory(needed: int) -> None:
        if needed > memory:
            raise UserInputError("it takes more memory than its size explains, and may be made to do so.")

    # Protocol 2 has no bytes: Python 2 wrote them as texts.
    data = _NumbersOnly(io.BytesIO(content), encoding="latin1").load()
    check(isinstance(data, (list, tuple)) and len(data) == 7, "it must hold a list of 7 arrays")
    # Lists may hold one array many times.
    check_memory(_NUMBER_BYTES * sum(_count_numbers(part, memory // _NUMBER_BYTES) for part in data))
    arrays = [np.asarray(part) for part in data]
    check(all(array.ndim for array in arrays), "it holds a single number in place of an array")
    # Pictures, scripted labels, labels, state-actions of both segments, rewards of both segments.
    images, _, labels, *rest = arrays
    count = len(labels)
    numbers = all(array.dtype.kind in _KINDS and len(array) == count for array in arrays)
    check(numbers, "its arrays must hold numbers and be equally long")
    if count == 0:
        return [], []  # no pair of this session was decided
    check(all(array.size for array in arrays), "some of its arrays are empty")
    pictures = images.ndim == 4 and images.dtype == np.uint8 and images.shape[3] == 3 and images.shape[2] % 2 == 0
    check(pictures, f"pictures must be uint8 [N, H, 2 W, 3], not {images.shape}")
    values = labels.reshape(count, -1)[:, 0]
    check(bool(np.isin(values, (-1, 0, 1)).all()), "it holds other labels than 0, 1 and -1, such as scores")
    steps = all(array.ndim > 1 for array in rest[:2]) and all(array[0].size for array in rest)
    check(steps, "segments must hold at least one step")
    states = [array.reshape(count, -1, array.shape[-1]).astype(np.float32) for array in rest[:2]]
    size = states[0].shape[2]
    check(0 < observation_size <= size, f"{observation_size} of its {size} numbers per step cannot be observations")
    rewards = [array.reshape(count, -1).astype(np.float32) for array in rest[2:]]
    check(len({array.shape[1] for array in (*states, *rewards)}) == 1, "its segments and rewards differ in length")
    shape = images.shape[1:] if image_size is None else (image_size, 2 * image_size, 3)
    check_memory(states[0].shape[0] * states[0].shape[1] * int(np.prod(shape)))  # pictures of all steps
    halves = np.split(images, 2, axis=2)

    def segment(number: int, side: int) -> Segment:
        rows = states[side][number]
        # The original shows the last frame of a segment; one picture stands for all its steps.
        frame = halves[side][number]
        if image_size is not None:
            frame = np.asarray(Image.fromarray(frame).resize((image_size, image_size), Image.Resampling.BILINEAR))
        frames = np.broadcast_to(frame, (len(rows), *frame.shape))
        return Segment(rows[:, :observation_size], rows[:, observation_size:], rewards[side][number], frames)

    pairs = [SegmentPair(segment(number, 0), segment(number, 1)) for number in range(count)]
    return pairs, [Label(cast(LabelValue, int(value)), text="imported") for value in values]


def _count_numbers(part: Any, most: int) -> int:
    """How many numbers and lists a part of a cache holds; it is not counted much further than to `most`."""
    if isinstance(part, (_Array, np.ndarray)):
        return int(np.asarray(part).size)
    if isinstance(part, (list, tuple)):
        count = 1
        for item in part:
            count += _count_numbers(item, most - count)
            if count > most:
                break
        return count
    if isinstance(part, (int, float, np.generic)):
        return 1
    raise UserInputError(f"its arrays must hold numbers, and one holds {type(part).__name__}.")


class _NumbersOnly(pickle._Unpickler):
    """Unpickles plain numpy arrays, numpy scalars and Python's own containers and numbers."""

    def load_bytearray8(self) -> None:
        """Python's own makes the array before it looks how many bytes are left."""
        size = int.from_bytes(self.read(8), "little")  # type: ignore[attr-defined]
        self.append(bytearray(self.read(size)))  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }

    def find_class(self, module: str, name: str) -> Any:
        key = (module.replace("numpy._core", "numpy.core"), name)
        if key not in _KNOWN:
            raise UserInputError(f"it asks for {module}.{name}, which is no plain array; nothing of it was run.")
        return _KNOWN[key]


class _Maker(NamedTuple):
    """A function that a pickle may call, and cannot change: a tuple has no state to set."""

    make: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.make(*arguments)


class _DType:
    """Stands for `numpy.dtype`: kinds of numbers only."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.dtype = np.dtype(name) if isinstance(name, str) else np.dtype(object)
        if self.dtype.kind not in _KINDS:
            raise UserInputError(f"it holds an array of {name!r}, not of numbers.")

    def __setstate__(self, state: Any) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """Stands for an array that a pickle makes empty and fills afterwards."""

    def __init__(self, *_: Any) -> None:
        self.array = np.empty(0, dtype=np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.array = _from_buffer(data, dtype, shape, "F" if fortran else "C")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array, dtype)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    data = _latin1(data) if isinstance(data, str) else data
    if not isinstance(dtype, _DType) or not isinstance(data, (bytes, bytearray)):
        raise UserInputError("it holds an array of objects, not of numbers.")
    return np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if order == "F" else "C")


def _latin1(text: Any, encoding: Any = "latin1") -> bytes:
    """Python 3 writes bytes so in protocol 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise UserInputError("it holds a text where bytes must be.")
    return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): None,  # only named, as an argument of _reconstruct
    ("numpy", "dtype"): _Maker(_DType),
    ("numpy.core.multiarray", "_reconstruct"): _Maker(_Array),
    ("numpy.core.multiarray", "scalar"): _Maker(lambda dtype, data: _from_buffer(data, dtype, (), "C")[()]),
    ("_codecs", "encode"): _Maker(_latin1),
    ("numpy.core.numeric", "_frombuffer"): _Maker(_from_buffer),
}
