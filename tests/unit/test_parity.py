"""Engine and learner compute what transformers computes, for models of every family; and the check can fail."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_shapes import FAMILIES, build

from rl_vlm.models.families.generic import Backbone
from rl_vlm.models.families.processor import ProcessorImages
from rl_vlm.types import RLVLMError

pytestmark = pytest.mark.slow  # whole models of every family


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("parity")


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.acceptance) if "published" in one else one for one in FAMILIES]
)
def test_a_family_computes_what_transformers_computes(parity: Any, family: str, tmp_path: Path) -> None:
    cells = parity.Parity(build(family, tmp_path / family)).run()
    assert parity.wrong(cells) == [], cells


def swapped(own: Callable[..., Any]) -> Callable[..., Any]:
    """The features of images in the other order."""
    return lambda self, images: own(self, images)[::-1]


def shifted(own: Callable[..., Any]) -> Callable[..., Any]:
    """Image tokens that stand two places later than they do."""

    def positions(self: ProcessorImages, token_ids: np.ndarray, images: Any) -> np.ndarray:
        return own(self, token_ids, images) + 2 * (token_ids == self.image_token_id)

    return positions


@pytest.mark.parametrize(
    ("target", "name", "fault"),
    [(Backbone, "image_features", swapped), (ProcessorImages, "positions", shifted)],
)
def test_a_fault_is_found(
    parity: Any, target: type, name: str, fault: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, name, fault(getattr(target, name)))
    cells = parity.Parity(build("idefics3", tmp_path / "model")).run()
    assert {"learner", "engine"} <= set(parity.wrong(cells)), cells


def test_features_of_another_size_are_refused(parity: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessorImages, "num_features", lambda self, width, height: 7)
    bench = parity.Parity(build("internvl", tmp_path / "model"))
    image = parity.conversations()["one image"][0].parts[0]
    with pytest.raises(RLVLMError, match="gives an image of 7 tokens features of the shapes"):
        bench.policy.backbone.image_features([image])
