"""What must hold before anybody trains: run `pytest`."""

from __future__ import annotations

import pytest

from rl_vlm.config import PolicyConfig, load_config
from rl_vlm.testing import LocalRunner

CALL = '<tool_call>\n{{"name": "open_box", "arguments": {{"number": {}}}}}\n</tool_call>'


@pytest.mark.parametrize(("opened", "reward"), [([0, 1], 1.0), ([0, 2], 0.0), ([1], 0.0), ([0, 0], 0.0)])
def test_who_looks_at_the_card_finds_the_prize(opened: list[int], reward: float) -> None:
    """The prize of item 0 is in box 1."""
    run, numbers = load_config("config.yaml"), iter(opened)
    assert isinstance(run, PolicyConfig)
    runner = LocalRunner(run, lambda request, sample: CALL.format(next(numbers)))
    (episode,) = runner.play(index=0).trajectories
    runner.stop()
    assert (episode.reward, len(episode.turns)) == (reward, len(opened))
    assert len(episode.images) == opened[:-1].count(0)  # no answer came after the last picture
