"""The reward model: an ensemble of networks and its training."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from rl_vlm.config import RewardModelSection
from rl_vlm.files import write_atomic
from rl_vlm.labelling.labels import InputKind, Label, Score, Segment, SegmentPair
from rl_vlm.preference.reward_examples import Examples
from rl_vlm.preference.reward_networks import build_members
from rl_vlm.types import UserInputError

_INFERENCE_ROWS = {"image": 128, "state_action": 8192}


@dataclass(slots=True)
class FitReport:
    """One session of training."""

    epochs: int = 0
    losses: list[float] = field(default_factory=list)  # of each gradient step, means over the members
    accuracy: float = float("nan")  # over the last epoch, measured before each step; nan for scores


class RewardEnsemble:
    """Several networks, whose mean is the reward, trained from preferences (Bradley-Terry) or from scores.
    `input_shape` is (H, W, 3) or (O + A,); `seed` is that of the initial weights and of the order of the examples."""

    def __init__(
        self, input_shape: Sequence[int], settings: RewardModelSection, seed: int = 0, device: str = "cpu"
    ) -> None:
        self.settings, self.device = settings, device
        self.input_kind: InputKind = "state_action" if settings.architecture == "mlp" else "image"
        self._shape = tuple(input_shape)
        if self.input_kind == "image":
            height, width, _ = self._shape
            self._shape = (-(-height // settings.stride), -(-width // settings.stride), 3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.members = build_members(self._shape, settings).to(device)
        self._optimizer = torch.optim.Adam(self.members.parameters(), lr=settings.lr)
        self._rng = np.random.default_rng(seed)

    def rewards(self, inputs: np.ndarray) -> np.ndarray:
        """float32 [N], the mean of the members; inputs uint8 [N, H, W, 3] or float32 [N, O + A]."""
        return self.member_rewards(inputs).mean(0)

    def member_rewards(self, inputs: np.ndarray) -> np.ndarray:
        """float32 [E, N]."""
        inputs = self._subsampled(inputs)
        rows = _INFERENCE_ROWS[self.input_kind]
        self.members.eval()
        rewards = []
        with torch.inference_mode():
            for start in range(0, len(inputs), rows):
                batch = self._tensor(inputs[start : start + rows])
                rewards.append(self.members([batch] * self.settings.size).float().cpu())
        return torch.cat(rewards, 1).numpy() if rewards else np.empty((self.settings.size, 0), np.float32)

    def returns(self, batches: Sequence[np.ndarray]) -> Tensor:
        """[E, B, parts], with gradients: each member's returns of its own batch of segments [B, parts, T, ...]."""
        rows, parts = batches[0].shape[:2]
        inputs = [self._tensor(batch.reshape(-1, *batch.shape[3:])) for batch in batches]
        return self.members(inputs).reshape(len(batches), rows, parts, -1).sum(-1)  # type: ignore[no-any-return]

    def segment_returns(self, segments: Sequence[Segment]) -> np.ndarray:
        """float32 [E, N]: the sum of each member's rewards over each segment. All segments are equally long."""
        if not segments:
            return np.empty((self.settings.size, 0), np.float32)
        flat = np.concatenate([self.inputs_of(segment) for segment in segments])
        return self.member_rewards(flat).reshape(self.settings.size, -1, len(segments[0])).sum(-1)

    def preferences(self, pairs: Sequence[SegmentPair]) -> np.ndarray:
        """float32 [E, N]: each member's probability that the first segment is better (Bradley-Terry)."""
        returns = self.segment_returns([part for pair in pairs for part in (pair.first, pair.second)])
        difference = returns[:, 0::2] - returns[:, 1::2]
        return torch.sigmoid(torch.from_numpy(difference)).numpy()

    def inputs_of(self, segment: Segment) -> np.ndarray:
        """uint8 [T, H, W, 3], with every `stride`-th pixel, or float32 [T, O + A]. Raises UserInputError for none."""
        if self.input_kind == "state_action":
            inputs = np.concatenate([segment.observations, segment.actions], axis=1, dtype=np.float32)
        elif segment.frames is None:
            raise UserInputError("An image reward model needs segments with pictures: give the environment a camera.")
        else:
            inputs = segment.frames
        return self._subsampled(inputs)

    def add_pairs(self, examples: Examples, pairs: Sequence[SegmentPair], labels: Sequence[Label]) -> int:
        """Add the pairs that were decided; returns how many. Raises UserInputError for what the model cannot see."""
        before, low = len(examples), self.settings.label_margin
        for pair, label in zip(pairs, labels, strict=True):
            if label.is_decided:
                target = (1 - low, low) if label.value == 0 else (low, 1 - low)
                examples.add([self.inputs_of(pair.first), self.inputs_of(pair.second)], target)
        return len(examples) - before

    def add_scores(self, examples: Examples, segments: Sequence[Segment], scores: Sequence[Score]) -> int:
        """Add the segments that have a score s, with the target 2 s - 1 in the range of a reward; returns how many."""
        before = len(examples)
        for segment, score in zip(segments, scores, strict=True):
            if score.value is not None and not score.error:
                examples.add([self.inputs_of(segment)], (2 * score.value - 1,))
        return len(examples) - before

    def _subsampled(self, inputs: np.ndarray) -> np.ndarray:
        """The inputs with every `stride`-th pixel. Raises UserInputError if they have another size."""
        stride = self.settings.stride
        if self.input_kind == "image" and stride > 1 and inputs.shape[1:] != self._shape:
            inputs = inputs[:, ::stride, ::stride]
        if inputs.shape[1:] != self._shape:
            raise UserInputError(f"The reward model sees inputs of {self._shape}, not of {inputs.shape[1:]}.")
        return inputs

    def _tensor(self, inputs: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(inputs)).to(self.device)

    def fit(self, examples: Examples) -> FitReport:
        """One session of training on all examples: pairs with an early stop, scores without one."""
        settings, report = self.settings, FitReport()
        if not len(examples):
            return report
        compares, read = examples.parts == 2, examples.reader()
        loss = preference_loss if compares else partial(score_loss, kind=settings.score_loss)
        targets = torch.tensor(examples.targets, device=self.device)
        self.members.train()
        while True:
            # Every member sees the examples in an order of its own.
            orders = np.stack([self._rng.permutation(len(examples)) for _ in range(settings.size)])
            right = total = 0
            for start in range(0, len(examples), settings.batch_size):
                indices = orders[:, start : start + settings.batch_size]
                returns = self.returns([read(row) for row in indices])
                wanted = targets[torch.from_numpy(indices).to(self.device)]  # [E, B, parts]
                losses = loss(returns, wanted)
                self._optimizer.zero_grad(set_to_none=True)
                losses.sum().backward()
                self._optimizer.step()
                report.losses.append(float(losses.detach().mean()))
                if compares:  # pairs whose preferred segment has the higher return, and pairs that have one
                    preferred, predicted = ((both[..., 1] - both[..., 0]).sign() for both in (wanted, returns.detach()))
                    right += int(((preferred == predicted) & (preferred != 0)).sum())
                    total += int((preferred != 0).sum())
            report.epochs += 1
            report.accuracy = right / total if total else float("nan")
            enough = len(report.losses) >= settings.min_gradient_steps
            if enough and (report.epochs >= settings.epochs or report.accuracy > settings.stop_accuracy):
                return report

    def save(self, path: str | Path) -> None:
        """Write weights, optimiser and random state as one safetensors file. The examples are in the label store."""
        tensors = {f"members.{name}": tensor for name, tensor in self.members.state_dict().items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        # One key: safetensors writes several in an order that differs from call to call, and equal states are equal
        # files.
        metadata = {"rng": json.dumps(self._rng.bit_generator.state)}
        # Copies: safetensors takes no tensors that share memory, and none in the channels-last layout.
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        write_atomic(path, to_safetensors(plain, metadata))

    def load(self, path: str | Path, weights_only: bool = False) -> None:
        """Go on from a file that `save` wrote, or begin with its weights. Raises UserInputError if it does not fit."""
        weights: dict[str, Tensor] = {}
        moments: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    kind, _, rest = name.partition(".")
                    if kind == "members":
                        weights[rest] = file.get_tensor(name)
                    else:
                        number, key = rest.split(".")
                        moments[int(number)][key] = file.get_tensor(name)
                random_state = json.loads(file.metadata()["rng"])
            self.members.load_state_dict(weights)
            if weights_only:
                return
            self._rng.bit_generator.state = random_state
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": dict(moments)})
        except (SafetensorError, OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
            raise UserInputError(f"The reward model in {path} does not fit this configuration: {error}") from error


def preference_loss(returns: Tensor, targets: Tensor) -> Tensor:
    """[E]: the Bradley-Terry model's cross-entropy (Christiano et al. 2017, equation 1), mean over the pairs; returns
    float32 [E, B, 2] of both segments, targets float32 [E, B, 2] summing to 1."""
    return -(targets * torch.log_softmax(returns, dim=-1)).sum(-1).mean(-1)


def score_loss(returns: Tensor, targets: Tensor, kind: Literal["squared", "absolute"] = "squared") -> Tensor:
    """[E]: squared or absolute error, mean over the examples; both float32 [E, B, 1]. The absolute one yields less to
    wrong scores (ERL-VLM, arXiv 2506.12822)."""
    error = returns - targets
    return (error.square() if kind == "squared" else error.abs()).mean((-1, -2))
