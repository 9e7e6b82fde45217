"""The reward model: an ensemble of networks, the examples that it is trained on, and its training."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from rl_vlm.config import PreferenceSection, RewardModelSection
from rl_vlm.files import write_atomic
from rl_vlm.labelling.store import is_answer
from rl_vlm.labelling.types import InputKind, Label, RewardModel, Score, Segment, SegmentPair
from rl_vlm.preference.replay import ReplayBuffer, StepBatch, pack, unpack
from rl_vlm.types import UserInputError

_SQUASH: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}
_LAST_LAYER = 1e-3  # bound of the last layer's initial weights: rewards begin near 0 and near each other


class ImageCNN(nn.Module):
    """Convolutions with ReLU, then one linear layer: float images [N, 3, H, W] in [0, 1] to [N].

    The layers are RL-VLM-F's. The initial weights are He's (2015, equation 10) and pixels are scaled to [-1, 1],
    because with RL-VLM-F's small uniform weights and pixels from 0 the loss hardly falls in the first hundreds of
    gradient steps (MetaWorld's drawer-open, 300 pairs, 60 steps: rank correlation with the true reward 0.73 to 0.76
    against 0.85 to 0.87).
    """

    def __init__(self, height: int, width: int, settings: RewardModelSection) -> None:
        super().__init__()
        kernels, channels, strides = settings.kernels, settings.channels, settings.strides
        if not len(kernels) == len(channels) == len(strides):
            raise UserInputError(
                f"The reward CNN needs as many kernels ({len(kernels)}) as channels ({len(channels)}) and strides "
                f"({len(strides)})."
            )
        layers: list[nn.Module] = []
        before = 3
        for kernel, after, stride in zip(kernels, channels, strides, strict=True):
            if min(height, width) < kernel:
                raise UserInputError(
                    f"Pictures of this size are too small for the reward CNN: a kernel of {kernel} meets {height} × "
                    f"{width} pixels. Use larger pictures or fewer layers."
                )
            layer = nn.Conv2d(before, after, kernel, stride)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
            layers += [layer, nn.ReLU()]
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            before = after
        self.features = nn.Sequential(*layers)
        self.last = nn.Linear(before * height * width, 1)
        nn.init.uniform_(self.last.weight, -_LAST_LAYER, _LAST_LAYER)
        nn.init.uniform_(self.last.bias, -_LAST_LAYER, _LAST_LAYER)
        self.squash = _SQUASH[settings.squash]()

    def forward(self, images: Tensor) -> Tensor:
        """[N, 3, H, W] to [N]."""
        return self.squash(self.last(self.features(2 * images - 1).flatten(1)))[:, 0]  # type: ignore[no-any-return]


def resnet18(weights: str | Path | None = None) -> nn.Module:
    """torchvision's ResNet-18 with one output, from scratch or from a local file of ImageNet weights (.safetensors,
    .pth).

    As in the original its output is not squashed. Raises UserInputError if the file does not fit.
    """
    import torchvision

    network = torchvision.models.resnet18(num_classes=1)
    if weights is not None:
        state = _read_weights(Path(weights))
        state = {name: tensor for name, tensor in state.items() if not name.startswith("fc.")}
        try:
            missing, unexpected = network.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise UserInputError(f"The weights in {weights} are not those of a ResNet-18: {error}") from error
        if unexpected or [name for name in missing if not name.startswith("fc.")]:
            raise UserInputError(f"The weights in {weights} are not those of a ResNet-18.")
    return network


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        # torch and safetensors raise many kinds; all mean that the file cannot be used.
        raise UserInputError(f"Cannot read the weights in {path}: {error}") from error


class ImageMembers(nn.Module):
    """Image networks of E members. Inputs are uint8 [N, H, W, 3], which is the channels-last layout already."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """One batch per member, to [E, N]."""
        rewards = []
        for network, frames in zip(self.networks, inputs, strict=True):
            rewards.append(network(frames.permute(0, 3, 1, 2).float() / 255).reshape(len(frames)))
        return torch.stack(rewards)


class MLPMembers(nn.Module):
    """E multilayer perceptrons with LeakyReLU as stacked weights: inputs float32 [N, D]."""

    def __init__(self, inputs: int, settings: RewardModelSection) -> None:
        super().__init__()
        size = settings.size
        widths = [inputs, *[settings.hidden] * settings.layers, 1]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for before, after in itertools.pairwise(widths):
            # torch.nn.Linear's own initial distribution.
            bound = 1 / math.sqrt(before)
            self.weights.append(nn.Parameter(torch.empty(size, before, after).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(size, 1, after).uniform_(-bound, bound)))
        self.squash = _SQUASH[settings.squash]()

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """One batch per member, to [E, N]."""
        hidden = torch.stack(list(inputs))
        last = len(self.weights) - 1
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            if number < last:
                hidden = nn.functional.leaky_relu(hidden)
        return self.squash(hidden)[..., 0]  # type: ignore[no-any-return]


# The reward ensemble: several networks, whose mean is the reward.

_INFERENCE_ROWS = {"image": 128, "state_action": 8192}


class RewardEnsemble:
    """Implements `RewardModel`.

    Args:
        input_shape: (H, W, 3) of the pictures, or (O + A,).
        settings: the networks and how they are trained.
        seed: of the initial weights.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        settings: RewardModelSection | None = None,
        seed: int = 0,
        *,
        device: str = "cpu",
    ) -> None:
        self.settings = settings or RewardModelSection()
        self.device = device
        self._shape = tuple(input_shape)
        if self.input_kind == "image":
            height, width, _ = self._shape
            self._shape = (-(-height // self.settings.stride), -(-width // self.settings.stride), 3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.members = _build(self._shape, self.settings).to(device)

    @property
    def input_kind(self) -> InputKind:
        """What its inputs are."""
        return "state_action" if self.settings.architecture == "mlp" else "image"

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
        """uint8 [T, H, W, 3], with every `stride`-th pixel, or float32 [T, O + A]. Raises UserInputError if they do not
        fit."""
        if self.input_kind == "state_action":
            inputs = np.concatenate([segment.observations, segment.actions], axis=1, dtype=np.float32)
        elif segment.frames is None:
            raise UserInputError("An image reward model needs segments with pictures: give the environment a camera.")
        else:
            inputs = segment.frames
        return self._subsampled(inputs)

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


# Training examples of a reward model in memory: the inputs of labelled segments, and what they should be worth.

_UNPACKED_BYTES = 2**30  # pictures that are kept unpacked while a model is trained


def target_of_label(label: Label, settings: RewardModelSection) -> tuple[float, float] | None:
    """(weight of the first, weight of the second), summing to 1; None if the label is not trained on.

    Where the label's probabilities are used, no preference counts half for each side.
    """
    if not is_answer(label) or (label.value == -1 and settings.ties == "skip"):
        return None
    if settings.soft_labels and label.probabilities is not None:
        first, second, neither = label.probabilities
        return first + neither / 2, second + neither / 2
    if label.value == -1:
        return 0.5, 0.5
    high, low = 1 - settings.label_margin, settings.label_margin
    return (high, low) if label.value == 0 else (low, high)


class Examples:
    """Examples of `parts` segments each (2 for pairs, 1 for scores) with targets float32 [N, parts].

    With more than `capacity` examples the oldest are dropped. All segments have one shape. Pictures are packed as their
    difference to the first one that was added.
    """

    def __init__(self, parts: int, capacity: int) -> None:
        self.parts = parts
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Drop all examples."""
        self._inputs: deque[tuple[np.ndarray | bytes, ...]] = deque(maxlen=self._capacity)
        self._targets: deque[tuple[float, ...]] = deque(maxlen=self._capacity)
        self._shape: tuple[int, ...] = ()  # of one segment's inputs
        self._segment_bytes = 0  # unpacked
        self._key: np.ndarray | None = None  # uint8 [H, W, 3]
        self._unpacked: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def nbytes(self) -> int:
        """Memory of the inputs."""
        return sum(len(part) if isinstance(part, bytes) else part.nbytes for row in self._inputs for part in row)

    @property
    def targets(self) -> np.ndarray:
        """float32 [N, parts]."""
        return np.array(list(self._targets), dtype=np.float32).reshape(-1, self.parts)

    def add(self, segments: Sequence[np.ndarray], target: tuple[float, ...]) -> None:
        """Keep one example: per segment the inputs uint8 [T, H, W, 3] or float32 [T, D]."""
        self._shape, self._segment_bytes = segments[0].shape, segments[0].nbytes
        if self._key is None and segments[0].dtype == np.uint8:
            self._key = segments[0][0].copy()
        self._inputs.append(tuple(segment if self._key is None else pack(segment, self._key) for segment in segments))
        self._targets.append(target)
        self._unpacked = None

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """[len(places), parts, T, ...]: the inputs at these places."""
        if len(self) * self.parts * self._segment_bytes > _UNPACKED_BYTES:
            return np.stack([self._read(index) for index in indices])
        if self._unpacked is None:
            self._unpacked = np.stack([self._read(index) for index in range(len(self))])
        return self._unpacked[indices]

    def forget_unpacked(self) -> None:
        """Free what `batch` has unpacked."""
        self._unpacked = None

    def _read(self, index: int) -> np.ndarray:
        parts = self._inputs[index]
        return np.stack(
            [
                part if self._key is None or isinstance(part, np.ndarray) else unpack(part, self._key, self._shape)
                for part in parts
            ]
        )


def add_pairs(examples: Examples, model: RewardEnsemble, pairs: Sequence[SegmentPair], labels: Sequence[Label]) -> int:
    """Add the pairs that may be trained on; returns how many. Raises UserInputError for segments that the model cannot
    see."""
    usable = 0
    for pair, label in zip(pairs, labels, strict=True):
        target = target_of_label(label, model.settings)
        if target is not None:
            examples.add([model.inputs_of(pair.first), model.inputs_of(pair.second)], target)
            usable += 1
    return usable


def add_scores(examples: Examples, model: RewardEnsemble, segments: Sequence[Segment], scores: Sequence[Score]) -> int:
    """Add the segments that have a score s, with the target 2 s - 1, the range of a squashed reward; returns how
    many."""
    usable = 0
    for segment, score in zip(segments, scores, strict=True):
        if score.value is not None and not score.error:
            examples.add([model.inputs_of(segment)], (2 * score.value - 1,))
            usable += 1
    return usable


# Training of a reward ensemble, from preferences (Bradley-Terry) or from scores.


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
        self._settings, self._batch_size = ensemble.settings, ensemble.settings.batch_size
        self._rng = np.random.default_rng(seed)
        self._optimizer = torch.optim.Adam(ensemble.members.parameters(), lr=self._settings.lr)

    def fit(self, examples: Examples) -> FitReport:
        """One session of training on all examples: pairs with an early stop, or scores with squared error and without
        one."""
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
                indices = orders[:, start:end]
                returns = self.ensemble.returns([examples.batch(row) for row in indices])
                wanted = targets[torch.from_numpy(indices).to(self.ensemble.device)]  # [E, B, parts]
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
        """Where batches begin. Batch normalisation needs two pictures: a last one that is alone joins the batch
        before."""
        starts = list(range(0, len(examples), self._batch_size))
        normalises, scores = self._settings.architecture == "resnet18", examples.parts == 1
        alone = normalises and scores and bool(starts) and len(examples) - starts[-1] == 1
        return starts[:-1] if alone else starts

    def save(self, path: str | Path) -> None:
        """Write weights, optimiser and random state as one safetensors file. The examples are in the label store."""
        tensors = {f"members.{name}": tensor for name, tensor in self.ensemble.members.state_dict().items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        # One key: safetensors writes several in an order that differs from call to call, and equal states are equal
        # files.
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
    """Over all members: pairs whose preferred segment has the higher return, and pairs that have a preferred
    segment."""
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


# The agent's reward: the task's own, success alone, or a reward model, learned or not.

# Reward modes by the similarity of picture and text: the labels.source with the same model.
_SIMILARITY_SOURCES = {"clip_image_text_matching": "clip", "blip2_image_text_matching": "itm"}


class AgentReward:
    """Rewards of new steps, and of the whole replay buffer when the model has changed.

    `ensemble` is the reward model of learned modes, None for others. `device` is that of a model of picture and text.
    """

    def __init__(
        self, settings: PreferenceSection, env_id: str, ensemble: RewardModel | None, device: str = "cpu"
    ) -> None:
        self.mode = settings.reward
        self.model = ensemble
        if self.mode in _SIMILARITY_SOURCES:
            from rl_vlm.labelling.teachers import build_similarity  # transformers is slow to import

            labels = settings.labels.model_copy(update={"source": _SIMILARITY_SOURCES[self.mode]})
            self.model = build_similarity(labels, env_id, device)

    def rewards_of(self, batch: StepBatch) -> np.ndarray:
        """float32 [n]."""
        if self.mode == "gt_task_reward":
            return batch.true_rewards
        if self.mode == "sparse_task_reward":
            return batch.successes
        assert self.model is not None
        if self.model.input_kind == "image":
            assert batch.frames is not None
            return self.model.rewards(batch.frames)
        return self.model.rewards(np.concatenate([batch.observations, batch.actions], axis=1))

    def relabel(self, replay: ReplayBuffer) -> None:
        """Replace the reward of every row by the model's present one."""
        assert self.model is not None
        replay.relabel_with(self.model.input_kind, self.model.rewards)
