"""What `model.train: full` cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_vlm.config.run import RunConfig


def check_full(run: RunConfig) -> None:
    """Raise ValueError, one sentence that says what to change, for a run that trains all weights and asks for what LoRA alone can."""
    name = run.algorithm.name
    if not run.spec.publishes_adapters:
        raise ValueError(f"model.train: full has no effect with algorithm.name {name}: remove it")
    if run.model.adapter is not None:
        raise ValueError(
            "model.adapter belongs to model.train: lora: export it into its model with `rl-vlm export`, and give that folder as "
            "model.path"
        )
    if run.model.dtype == "float16":
        raise ValueError(
            "model.train: full computes gradients in the model's precision, and those of float16 underflow: set model.dtype to "
            "bfloat16 or float32"
        )
    if run.serving.shared:
        raise ValueError(
            "serving.shared serves several policies on one set of weights, which model.train: full changes: leave it out, or set "
            "model.train to lora"
        )
    if run.serving.quantization != "none":
        raise ValueError(
            f"serving.quantization {run.serving.quantization} is computed when a model is loaded, and model.train: full sends new "
            "weights after every update: set it to none, or model.train to lora"
        )
    if run.learner.in_step:
        raise ValueError(
            f"learner.strategy {run.learner.strategy} shards frozen weights, of which model.train: full has none: use all_reduce "
            "(every learner holds the whole model), or set model.train to lora"
        )
    if run.spec.has_critic and run.critic.kind == "adapter":
        raise ValueError(
            "critic.kind adapter needs frozen weights beside it, of which model.train: full has none: use critic.kind head"
        )
    if run.rollout.in_flight_updates == "keep" and run.serving.expected_engine == "vllm":
        raise ValueError(
            "rollout.in_flight_updates keep would mix image features and cached prompts of several versions with model.train: full "
            "and vLLM: set it to recompute"
        )
    asks_base = any(
        "judge" in part.reward.weights and (part.reward.judge.endpoint is None or part.reward.judge.against == "start")
        for part in run.env.parts.values()
    )
    if asks_base and run.serving.expected_engine == "vllm":
        raise ValueError(
            "env.reward.judge asks the base model, which replicas of vLLM no longer hold with model.train: full: give it an "
            "endpoint and against: reference, or set serving.engine to transformers"
        )
