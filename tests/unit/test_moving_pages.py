"""The pages for users of other systems: every key and log name on them exists, and their commands are understood."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_vlm.config import PolicyConfig, PreferenceConfig, load_config
from rl_vlm.config.section import keys_of
from rl_vlm.envs.foreign.slime import SlimeEnv
from rl_vlm.zoo.geo3k.environment import Geo3kEnv

ROOT = Path(__file__).resolve().parents[2]
SLIME = ROOT / "docs" / "slime.md"
PAGES = [SLIME, ROOT / "docs" / "vlm_gym.md", ROOT / "docs" / "rl_vlm_f.md"]
RECIPE = ROOT / "configs" / "geo3k_qwen3vl_2b.yaml"
KEYS = {*keys_of(PolicyConfig), *keys_of(PreferenceConfig)}
_KEY = re.compile(r"((?:[a-z_]+\.)+[a-z_]+)(?:(?::\s*|=)([^`]+))?")

# What the example's script passes, its evaluation, which is commented out there, included.
_FLAGS = """
hf-checkpoint use-wandb wandb-project wandb-group wandb-key prompt-data input-key label-key multimodal-keys rm-type apply-chat-template
custom-generate-function-path custom-config-path rollout-shuffle num-rollout rollout-batch-size n-samples-per-prompt
rollout-max-response-len rollout-temperature global-batch-size eval-interval eval-prompt-data n-samples-per-eval-prompt
eval-max-response-len eval-top-k advantage-estimator kl-loss-coef kl-loss-type kl-coef entropy-coef eps-clip eps-clip-high optimizer lr
lr-decay-style weight-decay adam-beta1 adam-beta2 rollout-num-gpus-per-engine sglang-mem-fraction-static sglang-cuda-graph-bs
train-backend gradient-checkpointing sglang-attention-backend attn-implementation update-weight-buffer-size load
tensor-model-parallel-size sequence-parallel pipeline-model-parallel-size context-parallel-size expert-model-parallel-size
expert-tensor-parallel-size recompute-granularity recompute-method recompute-num-layers use-dynamic-batch-size max-tokens-per-gpu
attention-dropout hidden-dropout accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 attention-backend megatron-to-hf-mode
actor-num-nodes actor-num-gpus-per-node rollout-num-gpus colocate
"""
FLAGS = _FLAGS.split()
VARIABLES = ("MODEL_NAME", "NUM_GPUS", "EXTERNAL_RAY", "TRAIN_BACKEND")


def quoted(page: Path) -> list[str]:
    """What stands in back quotes outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


def keys_on(page: Path) -> Iterator[tuple[str, str | None]]:
    """The dotted keys of a configuration that a page names, and the value that it gives to each."""
    for text in quoted(page):
        match = _KEY.fullmatch(text)
        if match and match[1].partition(".")[0] in KEYS and match[2] != "value":
            yield match[1], match[2]


def commands(page: Path) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_exists(page: Path) -> None:
    found = [key for key, _ in keys_on(page)]
    assert len(set(found)) > 20
    for key in found:
        if key.startswith("env.kwargs."):
            arguments = {*inspect.signature(Geo3kEnv).parameters, *inspect.signature(SlimeEnv).parameters}
            assert key.removeprefix("env.kwargs.") in arguments, key
        else:
            assert key in KEYS, key


def test_every_value_for_a_key_on_slimes_page_is_legal() -> None:
    given = [(key, value) for key, value in keys_on(SLIME) if value is not None]
    assert len(given) >= 10
    for key, value in given:
        load_config(RECIPE, [f"{key}={value}"])


def test_no_flag_and_no_variable_of_slimes_example_is_missing() -> None:
    text = SLIME.read_text()
    named = set(re.findall(r"--([a-z][a-z0-9-]+)", text))
    assert len(FLAGS) == 68
    assert set(FLAGS) <= named, set(FLAGS) - named
    for name in VARIABLES:
        assert f"`SLIME_SCRIPT_{name}`" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_log_names_are_logged(page: Path) -> None:
    source = "".join(path.read_text() for path in (ROOT / "rl_vlm").rglob("*.py"))
    rows = re.findall(r"^\| ([^|]*)\| ([^|]*)\|", page.read_text().partition("log name")[2], re.MULTILINE)
    names = [
        name
        for _, ours in rows
        for name in re.findall(r"`((?:reward|policy|value|mismatch|rollout)/[a-z_0-9]+)`", ours)
    ]
    assert names or "log name" not in page.read_text()
    for name in names:
        assert f'"{name}"' in source, name
