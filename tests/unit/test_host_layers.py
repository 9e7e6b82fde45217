"""Layers that will be sharded never come to the device whole."""

from __future__ import annotations

from pathlib import Path

from rl_vlm.models.loading import load_model


def test_layers_stay_in_host_memory_until_they_are_sharded(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, "float32", "meta", layers_on_host=True)  # a device where nothing is allocated
    inside = {name for name, _ in model.named_parameters() if ".language_model.layers." in name}
    assert inside and len(inside) < len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert parameter.device.type == ("cpu" if name in inside else "meta"), name
    assert all(parameter.is_meta for parameter in load_model(tiny_folder, "float32", "meta").parameters())
