"""The original's label caches are read; a pickle that wants anything else is refused and runs nothing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_vlm.labelling.import_labels import import_labels, read_cache
from rl_vlm.labelling.store import LabelStore
from rl_vlm.types import UserInputError

RNG = np.random.default_rng(0)
PAIRS = 4


def cache(**changes: Any) -> list[Any]:
    """A session as the original writes it: two steps per segment, 3 observations, 2 actions."""
    parts = {
        "images": RNG.integers(0, 256, (PAIRS, 10, 16, 3), dtype=np.uint8),
        "scripted": np.array([[0], [1], [1], [0]]),
        "labels": np.array([[0], [1], [-1], [1]]),
        "sa_1": RNG.normal(size=(PAIRS, 2, 5)),
        "sa_2": RNG.normal(size=(PAIRS, 2, 5)).astype(np.float32),
        "r_1": RNG.normal(size=(PAIRS, 2, 1)),
        "r_2": RNG.normal(size=(PAIRS, 2, 1)),
    }
    return list({**parts, **changes}.values())


def written(folder: Path, content: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> Path:
    file = folder / "2024-01-01-00-00-00.pkl"
    file.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol))
    return file


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_cache_of_any_protocol_since_2_is_read(tmp_path: Path, protocol: int) -> None:
    data = cache()
    pairs, labels = read_cache(written(tmp_path, data, protocol), observation_size=3)
    assert [label.value for label in labels] == [0, 1, -1, 1]
    for number, pair in enumerate(pairs):
        assert pair.first.frames is not None and pair.second.frames is not None
        assert pair.first.frames.shape == (2, 10, 8, 3)
        assert (pair.first.frames[1] == data[0][number][:, :8]).all()
        assert (pair.second.frames[0] == data[0][number][:, 8:]).all()
        np.testing.assert_allclose(pair.first.observations, data[3][number][:, :3], rtol=1e-6)
        np.testing.assert_allclose(pair.second.actions, data[4][number][:, 3:], rtol=1e-6)
        np.testing.assert_allclose(pair.second.true_rewards, data[6][number][:, 0], rtol=1e-6)


def test_a_folder_becomes_a_store(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.pkl").write_bytes(pickle.dumps(cache()))
    assert import_labels(tmp_path, tmp_path / "store", observation_size=3, image_size=20) == (2, 8)
    pairs, _ = LabelStore(tmp_path / "store").read(2)
    assert pairs[0].first.frames.shape == (2, 20, 20, 3)
    with pytest.raises(UserInputError, match="empty folder"):
        import_labels(tmp_path, tmp_path / "store", observation_size=3)
    with pytest.raises(UserInputError, match=r"no \.pkl files"):
        import_labels(tmp_path / "store", tmp_path / "other", observation_size=3)


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(cache()))
    (tmp_path / "b.pkl").write_bytes(pickle.dumps(cache()[:6]))
    with pytest.raises(UserInputError, match="7 arrays"):
        import_labels(tmp_path, tmp_path / "store", observation_size=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pkl", "b.pkl"]
    (tmp_path / "b.pkl").unlink()
    (tmp_path / "store").mkdir()  # an empty folder may be there
    assert import_labels(tmp_path, tmp_path / "store", observation_size=3) == (1, PAIRS)


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def by_hand(*lines: str) -> bytes:
    return "\n".join(lines).encode() + b"."


@pytest.mark.parametrize(
    "content",
    [
        Evil(os.system, "touch PROOF"),
        Evil(eval, "open('PROOF', 'w')"),
        Evil(np.load, "PROOF", None, True),
        Evil(getattr, "text", "upper"),
        [Evil(os.system, "touch PROOF"), *cache()[1:]],
        cache(labels=np.array([Evil(os.system, "touch PROOF")] * PAIRS, dtype=object)),
        by_hand("cos", "system", "(S'touch PROOF'", "tR"),
        by_hand("cbuiltins", "exec", '(S\'open("PROOF", "w")\'', "tR"),
        by_hand("cnumpy", "ndarray", "((I3", "tS'O'", "tR"),
        by_hand("cnumpy", "dtype", "(S'O'", "tR"),
        by_hand("cnumpy", "dtype", "(dS'__call__'", "I1", "sb"),  # tries to change the reader
        by_hand("(S'touch PROOF'", "ios", "system", ""),
        by_hand("Ppersistent", ""),
        pickle.dumps(cache())[:200],
        b"",
        b"not a pickle",
    ],
    ids=lambda content: type(content).__name__,  # an address would differ between the processes that share the tests
)
def test_what_is_no_cache_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, content, protocol=2)
    with pytest.raises(UserInputError):
        read_cache(file, observation_size=3)
    assert not (tmp_path / "PROOF").exists()


def test_an_unrestricted_reader_would_have_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(by_hand("cos", "system", "(S'touch PROOF'", "tR"))
    assert (tmp_path / "PROOF").exists()  # the check above can fail


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (cache()[:6], "a list of 7 arrays"),
        (cache(labels=np.full((PAIRS, 1), 0.4)), "other labels than 0, 1 and -1"),
        (cache(labels=np.zeros((3, 1))), "equally long"),
        (cache(images=np.zeros((PAIRS, 10, 16, 3), np.float32)), "must be uint8"),
        (cache(images=np.zeros((PAIRS, 10, 15, 3), np.uint8)), "must be uint8"),
        (cache(sa_1=["a"] * PAIRS), "must hold numbers"),
        (cache(labels=np.int64(1)), "a single number"),
        (cache(sa_1=np.zeros(PAIRS)), "at least one step"),
        (cache(r_1=np.zeros((PAIRS, 3, 1))), "differ in length"),
    ],
)
def test_what_is_wrong_in_a_cache_is_said(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        read_cache(written(tmp_path, content), observation_size=3)
