"""Fixtures of the unit tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rl_vlm.models.supervised import DialogueEncoder


@pytest.fixture(scope="module")
def encoder(processor: Any) -> DialogueEncoder:
    """For the tiny model whose `processor` a module makes."""
    from rl_vlm.models.supervised import DialogueEncoder  # with torch, which most tests do without

    return DialogueEncoder.from_processor(processor)
