"""What the page says of tokens, recomputed with plain transformers and peft from the run's checkpoints."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from runs import ROOT, finished
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

import rl_vlm
from rl_vlm.models.loading import resolve_model
from rl_vlm.view.library import Library

LAMBDA = 0.95


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations of PPO of which everything is kept."""
    folder = tmp_path_factory.mktemp("ppo") / "run"
    finished(
        folder, "algorithm.iterations=3", "algorithm.advantage_normalization=none", "algorithm.advantage_scale=1",
        "evaluation.every=3", "evaluation.num_items=8", "logging.trajectories_every=1", "logging.checkpoint_every=1",
        "logging.keep_checkpoints=5", config=ROOT / "configs/ppo_tiny.yaml",
    )  # fmt: skip
    return folder


class Plain:
    """The policy before iteration `number`, by transformers and peft alone."""

    def __init__(self, run_dir: Path, number: int) -> None:
        folder, saved = resolve_model("tiny"), run_dir / "checkpoints" / f"iteration-{number - 1:06d}"
        base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, saved / "adapter").eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        head = load_file(saved / "learner.safetensors")
        self.weight, self.bias = head["critic.head.0.weight"], head["critic.head.0.bias"]
        scale = json.loads((saved / "state.json").read_text())["return_scale"]
        self.mean = scale["mean_sum"] / scale["weight"]
        self.std = math.sqrt(scale["square_sum"] / scale["weight"] - self.mean**2)
        tokenizer = self.processor.tokenizer
        never = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        never -= {tokenizer.convert_tokens_to_ids("<|im_end|>")}
        self.never = sorted(never | set(range(len(tokenizer), base.config.get_text_config().vocab_size)))

    @torch.no_grad()
    def of(self, row: Any, picture: Any) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and values of each token but the first."""
        ids = torch.tensor([row["token_ids"].tolist()])
        images = self.processor.image_processor(images=[picture], return_tensors="pt")
        kinds = (ids == self.model.config.image_token_id).long()
        found = self.model(input_ids=ids, mm_token_type_ids=kinds, **images, output_hidden_states=True)
        logits = found.logits[0].double()
        logits[:, self.never] = -math.inf
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        values = found.hidden_states[-1][0, :-1] @ self.weight[0] + self.bias[0]
        return logprobs.numpy(), (values.double() * self.std + self.mean).numpy()


def advantages_of(values: np.ndarray, reward: float) -> np.ndarray:
    """Generalised advantage estimation over tokens, undiscounted, of a reward that comes with the last one."""
    following, found = 0.0, []
    for k in reversed(range(len(values))):
        last = k == len(values) - 1
        delta = (reward if last else values[k + 1]) - values[k]
        following = delta + LAMBDA * following
        found.append(following)
    return np.array(found[::-1])


@pytest.mark.acceptance
def test_two_hundred_numbers_are_those_of_an_independent_forward_pass(run_dir: Path) -> None:
    library, run, rng = Library([run_dir]), rl_vlm.load_run(run_dir), random.Random(0)
    rows = run.trajectories
    checked: dict[str, list[float]] = {
        name: [] for name in ("engine", "learner", "ratio", "advantage", "value", "reward")
    }
    for iteration in (2, 3):
        plain = Plain(run_dir, iteration)
        own = rows[rows.iteration == iteration].reset_index(drop=True)
        for place in rng.sample(range(len(own)), 20):
            row = own.iloc[place]
            told = library.answer(f"runs/{run_dir.name}/episodes/train-{iteration}-{place}")
            logprobs, values = plain.of(row, run.image(row["images"][0]))
            (turn,) = told["turns"]
            sampled = range(turn["start"], turn["stop"])
            said = "".join(told["tokens"][turn["start"] : turn["stop"]]).removesuffix("<|im_end|>")
            reward = float(
                re.fullmatch(r"<answer>(\d)</answer>", said.strip()) is not None
                and f">{told['info']['answer']}<" in said
            )
            advantages = advantages_of(values[sampled.start - 1 : sampled.stop - 1], reward)
            for token in rng.sample(sampled, min(5, len(sampled))):
                wanted = float(logprobs[token - 1])
                checked["engine"].append(abs(told["engine"][token] - wanted))
                checked["learner"].append(abs(told["learner"][token] - wanted))
                checked["ratio"].append(abs(math.exp(told["learner"][token] - told["engine"][token]) - 1))
                checked["value"].append(abs(told["values"][token] - values[token - 1]))
                checked["advantage"].append(abs(told["advantages"][token] - advantages[token - sampled.start]))
                checked["reward"].append(abs(turn["reward"] - reward))
    assert len(checked["engine"]) >= 180
    print({name: f"{max(errors):.2g}" for name, errors in checked.items()}, len(checked["engine"]))
    for name, errors in checked.items():
        assert max(errors) < 1e-4, name
