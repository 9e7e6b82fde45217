"""Fixtures of the unit tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rl_vlm.models.images import TextSide
    from rl_vlm.models.supervised import DialogueEncoder


@pytest.fixture(scope="module")
def encoder(processor: Any) -> DialogueEncoder:
    """For the tiny model whose `processor` a module makes."""
    from rl_vlm.models.supervised import DialogueEncoder  # with torch, which most tests do without

    return DialogueEncoder(processor)


@pytest.fixture(scope="session")
def text(tiny_folder: Path) -> TextSide:
    """Codec and image geometry of the tiny model."""
    from core_support import text_side

    return text_side(tiny_folder)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    """The tiny model as transformers loads it."""
    from core_support import plain_model

    return plain_model(tiny_folder)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Call it with packages: what the test imports of them is forgotten after it, and the paths they were found on."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    packages: list[str] = []
    yield lambda *names: packages.extend(names)
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


@pytest.fixture
def on_path(forgotten: Callable[..., None]) -> None:
    """Makes tests/fixtures/envs importable as a user's own packages are."""
    forgotten("envs")
    sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the registry of environments after the test."""
    from rl_vlm.envs import registry

    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
