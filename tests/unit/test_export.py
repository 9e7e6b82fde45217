"""Export: the merged folder computes what the adapter computes, and appears complete or not at all."""

import json
import shutil

import pytest
import torch

from rl_vlm.models.export import check_target, export_model, find_trained_and_model, replace_model
from rl_vlm.models.loading import load_model, quiet_libraries
from rl_vlm.models.lora import inject_lora, linear_weights, lora_config, lora_state, merged_weights
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.types import UserInputError


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    """A tiny base model."""
    quiet_libraries()
    return tiny_folder


@pytest.fixture(scope="module")
def adapted(tiny):
    """The model with LoRA layers whose weights are not zero, and their payload."""
    model, config = load_model(tiny), lora_config(4, 8, "all")
    torch.manual_seed(0)
    inject_lora(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model, AdapterPayload.build(3, lora_state(model), config)


@pytest.fixture
def adapter(adapted, tmp_path):
    return adapted[1].write(tmp_path / "adapter")


def test_the_export_computes_what_the_adapter_computes(tiny, adapted, adapter, tmp_path):
    out = export_model(adapter, tmp_path / "out", str(tiny))
    exported = load_model(out)
    ids = torch.randint(5, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, plain = adapted[0](input_ids=ids).logits, load_model(tiny)(input_ids=ids).logits
        torch.testing.assert_close(exported(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - plain).abs().max() > 0.1
    assert not any("lora" in name for name in exported.state_dict())
    assert (out / "chat_template.jinja").read_text() == (tiny / "chat_template.jinja").read_text()
    assert {path.name for path in tiny.iterdir()} <= {path.name for path in out.iterdir()}


def test_a_run_folder_names_its_model(tiny, adapter, tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps({"model": {"path": str(tiny)}}))
    assert find_trained_and_model(tmp_path) == (adapter, str(tiny))
    assert export_model(tmp_path, tmp_path / "out").is_dir()
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(UserInputError, match="--model"):
        export_model(tmp_path, tmp_path / "other")


def test_an_existing_export_is_refused_and_replaced_on_demand(tiny, adapter, tmp_path):
    out = tmp_path / "out"
    export_model(adapter, out, str(tiny))
    weights = (out / "model.safetensors").stat().st_ino
    (out / "README.md").write_text("a model card")
    (out / "notes").mkdir()
    (out / "notes" / "today.txt").write_text("mine")
    with pytest.raises(UserInputError, match="--overwrite"):
        export_model(adapter, out, str(tiny))
    export_model(adapter, out, str(tiny), overwrite=True)
    assert (out / "model.safetensors").stat().st_ino != weights
    assert (out / "README.md").read_text() == "a model card" and (out / "notes" / "today.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "out"]


def test_only_what_the_marker_lists_is_replaced(tmp_path):
    def export(*names):
        with replace_model(tmp_path / "out") as draft:
            for name in names:
                (draft / name).write_text("new")

    out = tmp_path / "out"
    export("config.json", "model-1-of-2", "model-2-of-2")
    (out / "mine").write_text("old")
    with pytest.raises(UserInputError, match="out/mine"):
        export("config.json", "mine")
    assert (out / "mine").read_text() == "old" and (out / "model-2-of-2").exists()
    export("config.json", "model")
    assert sorted(path.name for path in out.iterdir()) == [".rl_vlm_model", "config.json", "mine", "model"]


def test_foreign_folders_and_the_inputs_are_never_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").write_text("")
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "home", tmp_path / "file"):
        with pytest.raises(UserInputError, match="not a model folder"):
            check_target(place, overwrite=True)
    inside = tmp_path / "run" / "adapter"
    inside.mkdir(parents=True)
    for place in (inside, tmp_path / "run"):
        with pytest.raises(UserInputError, match="output folder"):
            check_target(place, overwrite=True, keep=(inside,))


def test_an_adapter_of_another_model_is_refused(tiny, adapted, tmp_path):
    _, payload = adapted
    state = payload.state()
    first = next(iter(state))
    fewer = {name: tensor for name, tensor in state.items() if name != first}
    for number, tensors in enumerate((fewer, {**state, first: state[first] * float("nan")})):
        folder = AdapterPayload.build(1, tensors, lora_config(4, 8, "all")).write(tmp_path / str(number))
        with pytest.raises(UserInputError):
            export_model(folder, tmp_path / "out", str(tiny))
    assert not (tmp_path / "out").exists()


def test_wrong_sources_are_named(tiny, tmp_path):
    with pytest.raises(UserInputError, match="There is no folder"):
        export_model(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(UserInputError, match="neither"):
        export_model(tmp_path, tmp_path / "out")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "NONSENSE"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(8))
    with pytest.raises(UserInputError, match="LORA"):
        export_model(tmp_path, tmp_path / "out" / "model", str(tiny))


def test_a_low_precision_model_stays_so_and_is_rounded_once(tiny, adapted, adapter, tmp_path):
    half = tmp_path / "half"
    load_model(tiny, "bfloat16").save_pretrained(half)
    for path in tiny.iterdir():
        if not (half / path.name).exists():
            shutil.copy(path, half)
    exported = load_model(export_model(adapter, tmp_path / "out", str(half)), "bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, weight in merged_weights(adapted[1], linear_weights(load_model(half, "bfloat16"))).items():
        assert torch.equal(exported.state_dict()[f"{name}.weight"], weight)
