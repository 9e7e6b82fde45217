"""Training of a reward ensemble, from preferences (Bradley-Terry) or from scores."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from rl_vlm.files import write_atomic
from rl_vlm.preference.reward_model.ensemble import RewardEnsemble
from rl_vlm.preference.reward_model.examples import Examples
from rl_vlm.types import UserInputError


@dataclass(slots=True)
class FitReport:
    """One session of training. `accuracy` is over the last epoch, measured before each step; nan for scores."""

    examples: int = 0
    epochs: int = 0
    gradient_steps: int = 0
    loss: float = float("nan")
    accuracy: float = float("nan")
    losses: list[float] = field(default_factory=list)  # per gradient step, mean over the members


class RewardTrainer:
    """Trains the members of `ensemble`; `seed` decides the order of the examples."""

    def __init__(self, ensemble: RewardEnsemble, seed: int = 0) -> None:
        self.ensemble = ensemble
        self._settings = ensemble.settings
        self._rng = np.random.default_rng(seed)
        self._optimizer = torch.optim.Adam(ensemble.members.parameters(), lr=self._settings.lr)

    def fit(self, examples: Examples) -> FitReport:
        """One session of training on all examples: pairs with an early stop, or scores with squared error and without one."""
        settings, members = self._settings, self.ensemble.members
        report = FitReport(examples=len(examples))
        starts = self._batch_starts(examples)
        if not starts:
            return report
        compares = examples.parts == 2
        targets = torch.from_numpy(examples.targets).to(self.ensemble.device)
        members.train()
        while True:
            # Every member sees the examples in an order of its own.
            orders = np.stack([self._rng.permutation(len(examples)) for _ in range(settings.size)])
            right = total = 0
            for start, end in zip(starts, [*starts[1:], len(examples)], strict=True):
                places = orders[:, start:end]
                returns = self.ensemble.returns([examples.batch(row) for row in places])
                wanted = targets[torch.from_numpy(places).to(self.ensemble.device)]  # [E, B, parts]
                losses = preference_loss(returns, wanted) if compares else score_loss(returns, wanted)
                self._optimizer.zero_grad(set_to_none=True)
                losses.sum().backward()
                self._optimizer.step()
                report.losses.append(float(losses.detach().mean()))
                if compares:
                    hits, count = _hits(returns.detach(), wanted)
                    right, total = right + hits, total + count
            report.epochs += 1
            report.gradient_steps = len(report.losses)
            report.accuracy = right / total if total else float("nan")
            report.loss = report.losses[-1]
            enough = report.gradient_steps >= settings.min_gradient_steps
            if enough and (report.epochs >= settings.epochs or report.accuracy > settings.stop_accuracy):
                examples.forget_unpacked()
                return report

    def _batch_starts(self, examples: Examples) -> list[int]:
        """Where batches begin. Batch normalisation needs two pictures: a last one that is alone joins the batch before."""
        starts = list(range(0, len(examples), self._settings.batch_size))
        normalises, scores = self._settings.architecture == "resnet18", examples.parts == 1
        alone = normalises and scores and bool(starts) and len(examples) - starts[-1] == 1
        return starts[:-1] if alone else starts

    def save(self, path: str | Path) -> None:
        """Write weights, optimiser and random state as one safetensors file. The examples are in the label store."""
        tensors = {f"members.{name}": tensor for name, tensor in self.ensemble.members.state_dict().items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        # One key: safetensors writes several in an order that differs from call to call, and equal states are equal files.
        metadata = {"rng": json.dumps(self._rng.bit_generator.state)}
        # Copies: safetensors takes no tensors that share memory, and none in the channels-last layout.
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        write_atomic(path, to_safetensors(plain, metadata))

    def load(self, path: str | Path) -> None:
        """Go on from a file that `save` wrote. Raises UserInputError if it does not fit the ensemble."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            weights = {name.removeprefix("members."): t for name, t in tensors.items() if name.startswith("members.")}
            self.ensemble.members.load_state_dict(weights)
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
    predicted = (returns[..., 1] - returns[..., 0]).sign()
    return int(((wanted == predicted) & (wanted != 0)).sum()), int((wanted != 0).sum())


def _adam_state(tensors: dict[str, Tensor]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith("adam."):
            _, number, key = name.split(".")
            state.setdefault(int(number), {})[key] = tensor
    return state
