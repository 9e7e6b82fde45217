"""The reward ensemble: several networks learn from preferences (Bradley-Terry) or scores, their mean is the reward."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from rl_vlm.config import RewardModelSection
from rl_vlm.files import write_atomic
from rl_vlm.labelling.types import Label, Score, Segment, SegmentPair
from rl_vlm.preference.reward_model.examples import Examples, InputKind, inputs_of
from rl_vlm.preference.reward_model.networks import ImageCNN, ImageMembers, MLPMembers, resnet18
from rl_vlm.types import UserInputError

_INFERENCE_ROWS = {"image": 128, "state_action": 8192}


@dataclass(slots=True)
class FitReport:
    """One session of training. `accuracy` is over the last epoch, measured before each step; nan for scores."""

    examples: int = 0
    epochs: int = 0
    gradient_steps: int = 0
    loss: float = float("nan")
    accuracy: float = float("nan")
    losses: list[float] = field(default_factory=list)  # per gradient step, mean over the members


Loss = Callable[[Tensor, Tensor], Tensor]


class RewardEnsemble:
    """Implements `RewardModel`.

    Args:
        input_shape: (H, W, 3) of the pictures, or (O + A,).
        settings: the networks and how they are trained.
        seed: of the initial weights and of the order of examples.
        capacity: how many pairs, and how many scores, are kept.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        settings: RewardModelSection | None = None,
        seed: int = 0,
        *,
        capacity: int = 20_000,
        device: str = "cpu",
    ) -> None:
        self._settings = settings or RewardModelSection()
        self._capacity, self._device = capacity, device
        self._shape = _input_shape(tuple(input_shape), self._settings)
        self._rng = np.random.default_rng(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._members = _build(self._shape, self._settings).to(device)
        self._optimizer = torch.optim.Adam(self._members.parameters(), lr=self._settings.lr)
        self.forget_examples()

    def forget_examples(self) -> None:
        """Drop all pairs and scores."""
        self.pairs = Examples(self.input_kind, 2, self._capacity)
        self.scores = Examples(self.input_kind, 1, self._capacity)

    @property
    def input_kind(self) -> InputKind:
        """What its inputs are."""
        return "state_action" if self._settings.architecture == "mlp" else "image"

    def rewards(self, inputs: np.ndarray) -> np.ndarray:
        """float32 [N], the mean of the members; inputs uint8 [N, H, W, 3] or float32 [N, O + A]."""
        return self.member_rewards(inputs).mean(0)

    def member_rewards(self, inputs: np.ndarray) -> np.ndarray:
        """float32 [E, N]."""
        inputs = self._subsampled(inputs)
        rows = _INFERENCE_ROWS[self.input_kind]
        self._members.eval()
        found = []
        with torch.inference_mode():
            for start in range(0, len(inputs), rows):
                batch = self._tensor(inputs[start : start + rows])
                found.append(self._members([batch] * self._settings.size).float().cpu())
        return torch.cat(found, 1).numpy() if found else np.empty((self._settings.size, 0), np.float32)

    def segment_returns(self, segments: Sequence[Segment]) -> np.ndarray:
        """float32 [E, N]: the sum of each member's rewards over each segment. All segments are equally long."""
        if not segments:
            return np.empty((self._settings.size, 0), np.float32)
        steps = len(segments[0])
        flat = np.concatenate([inputs_of(segment, self.input_kind) for segment in segments])
        return self.member_rewards(flat).reshape(self._settings.size, -1, steps).sum(-1)

    def preferences(self, pairs: Sequence[SegmentPair]) -> np.ndarray:
        """float32 [E, N]: each member's probability that the first segment is better (Bradley-Terry)."""
        returns = self.segment_returns([part for pair in pairs for part in (pair.first, pair.second)])
        difference = returns[:, 0::2] - returns[:, 1::2]
        return torch.sigmoid(torch.from_numpy(difference)).numpy()

    def add_pairs(self, pairs: Sequence[SegmentPair], labels: Sequence[Label]) -> int:
        """Keep the pairs that may be trained on; returns how many."""
        for pair in pairs[:1]:
            self._subsampled(inputs_of(pair.first, self.input_kind))  # raises before anything is kept
        return self.pairs.add_pairs(pairs, labels, self._settings)

    def add_scores(self, segments: Sequence[Segment], scores: Sequence[Score]) -> int:
        """Keep the segments that have a score; returns how many."""
        for segment in segments[:1]:
            self._subsampled(inputs_of(segment, self.input_kind))
        return self.scores.add_scores(segments, scores)

    def fit(self) -> FitReport:
        """One session of training on all pairs that are kept."""
        return self._fit(self.pairs, preference_loss)

    def fit_scores(self) -> FitReport:
        """One session of training on all scores that are kept: squared error, no early stop."""
        return self._fit(self.scores, score_loss)

    def _fit(self, examples: Examples, loss_of: Loss) -> FitReport:
        settings = self._settings
        report = FitReport(examples=len(examples))
        starts = self._batch_starts(examples)
        if not starts:
            return report
        targets = torch.from_numpy(examples.targets).to(self._device)
        decided = examples.parts == 2
        self._members.train()
        while True:
            # Every member sees the examples in an order of its own.
            orders = np.stack([self._rng.permutation(len(examples)) for _ in range(settings.size)])
            right = total = 0
            for start, end in zip(starts, [*starts[1:], len(examples)], strict=True):
                places = orders[:, start:end]
                returns = self._returns(examples, places)
                wanted = targets[torch.from_numpy(places).to(self._device)]  # [E, B, parts]
                losses = loss_of(returns, wanted)
                self._optimizer.zero_grad(set_to_none=True)
                losses.sum().backward()
                self._optimizer.step()
                report.losses.append(float(losses.detach().mean()))
                if decided:
                    hits, count = _hits(returns.detach(), wanted)
                    right, total = right + hits, total + count
            report.epochs += 1
            report.gradient_steps = len(report.losses)
            report.accuracy = right / total if total else float("nan")
            report.loss = report.losses[-1]
            enough = report.gradient_steps >= settings.min_gradient_steps
            if enough and (report.epochs >= settings.epochs or report.accuracy > settings.stop_accuracy):
                return report

    def _batch_starts(self, examples: Examples) -> list[int]:
        """Where batches begin. Batch normalisation needs two pictures: a last one that is alone joins the batch before."""
        starts = list(range(0, len(examples), self._settings.batch_size))
        normalises, scores = self._settings.architecture == "resnet18", examples.parts == 1
        alone = normalises and scores and bool(starts) and len(examples) - starts[-1] == 1
        return starts[:-1] if alone else starts

    def _returns(self, examples: Examples, places: np.ndarray) -> Tensor:
        """[E, B, parts]: the members' returns of the segments at places [E, B]."""
        batches = []
        for row in places:
            inputs = examples.batch(row)  # [B, parts, T, ...]
            batches.append(self._tensor(self._subsampled(inputs.reshape(-1, *inputs.shape[3:]))))
        members, rows = places.shape
        return self._members(batches).reshape(members, rows, examples.parts, -1).sum(-1)  # type: ignore[no-any-return]

    def _subsampled(self, inputs: np.ndarray) -> np.ndarray:
        """The inputs with every `stride`-th pixel. Raises UserInputError if they have another size."""
        stride = self._settings.stride
        if self.input_kind == "image" and stride > 1 and inputs.shape[1:] != self._shape:
            inputs = inputs[:, ::stride, ::stride]
        if inputs.shape[1:] != self._shape:
            raise UserInputError(f"The reward model sees inputs of {self._shape}, not of {inputs.shape[1:]}.")
        return inputs

    def _tensor(self, inputs: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(inputs)).to(self._device)

    def save(self, path: str | Path) -> None:
        """Write weights, optimiser and random state as one safetensors file. The examples are in the label store."""
        tensors = {f"members.{name}": tensor for name, tensor in self._members.state_dict().items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        # One key: safetensors writes several in an order that differs from call to call, and equal states are equal files.
        metadata = {"rng": json.dumps(self._rng.bit_generator.state)}
        # Copies: safetensors takes no tensors that share memory, and none in the channels-last layout.
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        write_atomic(path, to_safetensors(plain, metadata))

    def load(self, path: str | Path) -> None:
        """Go on from a file that `save` wrote. Raises UserInputError if it does not fit this ensemble."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            weights = {name.removeprefix("members."): t for name, t in tensors.items() if name.startswith("members.")}
            self._members.load_state_dict(weights)
            self._optimizer.load_state_dict(
                {"state": _adam_state(tensors), "param_groups": self._optimizer.state_dict()["param_groups"]}
            )
            self._rng.bit_generator.state = json.loads(metadata["rng"])
        except (SafetensorError, OSError, RuntimeError, KeyError, ValueError) as error:
            raise UserInputError(f"The reward model in {path} does not fit this configuration: {error}") from error


def preference_loss(returns: Tensor, targets: Tensor) -> Tensor:
    """[E]: cross-entropy of the Bradley-Terry model, mean over the pairs (Christiano et al. 2017, equation 1).

    returns float32 [E, B, 2] of the two segments, targets float32 [E, B, 2] summing to 1.
    """
    return -(targets * torch.log_softmax(returns, dim=-1)).sum(-1).mean(-1)


def score_loss(returns: Tensor, targets: Tensor) -> Tensor:
    """[E]: squared error, mean over the examples; both float32 [E, B, 1]."""
    return (returns - targets).square().mean((-1, -2))


def _hits(returns: Tensor, targets: Tensor) -> tuple[int, int]:
    """Over all members: pairs whose preferred segment has the higher return, and pairs that have a preferred segment."""
    wanted = (targets[..., 1] - targets[..., 0]).sign()
    found = (returns[..., 1] - returns[..., 0]).sign()
    return int(((wanted == found) & (wanted != 0)).sum()), int((wanted != 0).sum())


def _adam_state(tensors: dict[str, Tensor]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith("adam."):
            _, number, key = name.split(".")
            state.setdefault(int(number), {})[key] = tensor
    return state


def _input_shape(shape: tuple[int, ...], settings: RewardModelSection) -> tuple[int, ...]:
    if settings.architecture == "mlp":
        if len(shape) != 1:
            raise UserInputError(
                f"A reward MLP sees states and actions, one row of numbers each, not inputs of {shape}."
            )
        return shape
    if len(shape) != 3 or shape[2] != 3:
        raise UserInputError(
            f"The reward model {settings.architecture} sees pictures (H, W, 3), not inputs of {shape}."
        )
    return -(-shape[0] // settings.stride), -(-shape[1] // settings.stride), 3


def _build(shape: tuple[int, ...], settings: RewardModelSection) -> nn.Module:
    if settings.architecture == "mlp":
        return MLPMembers(shape[0], settings)
    networks: list[nn.Module] = []
    for _ in range(settings.size):
        if settings.architecture == "resnet18":
            networks.append(resnet18(settings.weights))
        else:
            networks.append(ImageCNN(shape[0], shape[1], settings))
    return ImageMembers(networks)
