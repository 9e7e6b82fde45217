"""tools/eyes: the training of the model `eyes`, a few steps of it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tools.eyes import brush, train
from tools.eyes.ship import ship
from transformers import AutoModelForImageTextToText, AutoProcessor


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps", [20, 600])
def test_a_short_training_learns_goes_on_and_becomes_a_model(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(brush, "photographs", lambda: [brush.Image.new("RGB", (300, 300), "teal")])
    monkeypatch.setattr(train, "LOG_EVERY", 1)
    monkeypatch.setattr(train, "RISE", 10)
    folder = tmp_path / "training"
    first = steps * 4 // 5
    for until in (first, steps):
        train.main([str(folder), "--steps", str(until), "--batch", "16", "--workers", "1", "--nice", "0"])
    found = re.findall(r"step (\d+) (loss of cells|loss) ([\d.]+)", capfd.readouterr().out)
    assert [int(step) for step, _, _ in found] == list(range(1, steps + 1))  # the second one goes on
    cells, losses = ([float(loss) for _, of, loss in found if of == kind] for kind in ("loss of cells", "loss"))
    assert len(cells) == math.ceil(train.SEEING * first) and cells[-1] < cells[0]
    assert losses[first - len(cells) - 1] < losses[0]
    assert losses[first - len(cells)] < losses[0] - 0.5  # a mean that starts anew, over weights that do not
    ship(folder, tmp_path / "model")
    train.begin(tmp_path / "model", tmp_path / "again")
    again, newest = (torch.load(one / "newest.pt", weights_only=True) for one in (tmp_path / "again", folder))
    assert again["step"] == steps and train.processor_of(tmp_path / "again").tokenizer("red").input_ids
    for name, weight in again["model"].items():
        torch.testing.assert_close(weight, newest["model"][name], rtol=1e-2, atol=1e-4)
    stored = load_file(tmp_path / "model/model.safetensors")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    assert sum(weight.numel() for weight in model.parameters()) <= 6e6
    assert sum(file.stat().st_size for file in (tmp_path / "model").iterdir()) <= 12e6
    words = AutoProcessor.from_pretrained(tmp_path / "model").tokenizer
    assert words.decode(words("How many red circles?").input_ids) == "How many red circles?"
