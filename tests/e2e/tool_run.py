"""A run of a tool environment as its recorder writes it: every answer rests on a part of the picture that a call asked for.
One of its two replicas serves other weights, and dies at last."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from rl_vlm.config import PolicyConfig, save_config
from rl_vlm.learning.plan import TokenRecord
from rl_vlm.models.loading import load_text_side, resolve_model
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import EncodedImage, Message, StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn

REPLICAS = ("q7zk2m9x", "b3ffw01c")
DIED = f"No answer within 60 s after 9 attempts; the last error: Replica {REPLICAS[1]} is dead. Its engine has died: out of memory"
_SIDE, _ITERATIONS, _SAMPLES = 96, 12, 4


def scene(item: int, shade: int = 255) -> Image.Image:
    """Four squares, one in each corner."""
    image = Image.new("RGB", (_SIDE, _SIDE), (shade,) * 3)
    for corner in range(4):
        x, y = divmod(corner, 2)
        colour = tuple((40 + 97 * item + 61 * corner + 83 * channel) % 220 for channel in range(3))
        image.paste(colour, (x * 48 + 10, y * 48 + 10, x * 48 + 38, y * 48 + 38))
    return image


def episode(item: int, corner: int, name: str, replica: str, right: bool, shade: int = 255) -> Trajectory:
    """Look at the picture, ask for one corner of it, answer."""
    x, y = divmod(corner, 2)
    left, top = x * 48, y * 48
    whole = scene(item, shade)
    pictures = [
        EncodedImage.from_pil(one) for one in (whole, whole.crop((left, top, left + 48, top + 48)).resize((96, 96)))
    ]
    box = [left / _SIDE, top / _SIDE, (left + 48) / _SIDE, (top + 48) / _SIDE]
    called = json.dumps({"name": "zoom", "arguments": {"box": box}})
    messages = (
        Message.of("user", pictures[0], f"Which colour has square {item} of the four in the corners of this picture?"),
        Message.of("assistant", f"<think>Let me look closer.</think><tool_call>{called}</tool_call>"),
        Message.of("tool", pictures[1]),
        Message.of(
            "assistant", f"Corner {corner} is {'blue' if right else 'red'}, as the enlarged part of the picture shows."
        ),
    )
    mask = np.array([False, True, True, False, True, True])
    turns = tuple(
        Turn(at, at + 2, 3, StopReason.END_OF_TURN, reward, "") for at, reward in ((1, 0.0), (4, float(right)))
    )
    return Trajectory(
        name, np.arange(300, 306, dtype=np.int32), mask, np.where(mask, -0.5, 0).astype(np.float32), turns,
        TrajectoryStatus.COMPLETED, tuple(pictures),
        {"tool_calls": 1, "correct": right, "crops": [{"picture": 1, "of": 0, "box": box}]},
        messages, "", (replica, replica),
    ).check()  # fmt: skip


def write_tool_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    logging = {"tensorboard": False, "trajectories_per_dump": 100}
    config = PolicyConfig.model_validate({"name": folder.name, "env": {"id": "Zoom-v0"}, "logging": logging})
    save_config(config, folder / "config.yaml")
    recorder, text = RunRecorder(folder, config), load_text_side(resolve_model("tiny"))
    for iteration in range(1, _ITERATIONS + 1):
        metrics = {
            "reward/mean": iteration / 20,
            "rollout/groups": 8.0,
            "dropped/group_lost": 2.0 * max(0, iteration - 8),
        }
        metrics |= {"mismatch/kl": 1e-5 if iteration < 8 else 0.2, "time/step": 2.0, "time/sample": 1.5}
        recorder.log_iteration(iteration, metrics)
        recorder.log_failures(iteration, {f"{iteration}/{k}": DIED for k in range(2 * (iteration > 8))})
        groups = [
            TrajectoryGroup(f"{iteration}/{item}", item, [
                episode(item, sample, f"{iteration}/{item}:{sample}", REPLICAS[sample % 2], sample == item % 4)
                for sample in range(_SAMPLES)
            ])
            for item in range(3)
        ]  # fmt: skip
        members = [one for group in groups for one in group.trajectories]
        away = {REPLICAS[0]: np.float32(1e-6), REPLICAS[1]: np.float32(0.3)}
        record = TokenRecord(
            advantages={one.trajectory_id: np.full(4, one.reward - 0.25, np.float32) for one in members},
            logprobs={one.trajectory_id: one.logprobs[one.loss_mask] - away[one.replica_ids[0]] for one in members},
        )
        recorder.dump_trajectories(iteration, groups, record, text)
    for iteration in (0, _ITERATIONS):
        results = {"items/default": 8, "accuracy/default": 0.25 + iteration / 24, "lost": 1 + iteration // 6}
        results |= {
            f"sight/{name}": 0.5 for name in ("accuracy_blank", "accuracy_swapped", "accuracy_gap", "accuracy_gap_high")
        }
        recorder.log_evaluation(iteration, results | {"lost_because": {DIED: 1 + iteration // 6}})
        items = []
        for item in range(6):
            for view, shade in (("true", 255), ("blank", 127), ("swapped", 200)):
                task = RolloutTask("t", item, "test", 0, 0, 1, 0.0, 0, view=view, variant="default")
                right = view == "true" and (bool(iteration) or item < 2)
                one = episode(item, (item + bool(iteration)) % 4, f"e{item}", REPLICAS[0], right, shade)
                items.append((task, TrajectoryGroup("t", item, [one])))
        recorder.dump_evaluation(iteration, items, text)
    recorder.finish({"status": "done", "train_seconds": 24.0})
