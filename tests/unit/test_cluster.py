"""What a run asks of its cluster, in words. Nothing is started."""

from __future__ import annotations

import pytest
from preference_loop import run_config

from rl_vlm.config import parse_config
from rl_vlm.runs.cluster import check_resources
from rl_vlm.types import UserInputError


def test_a_preference_run_that_asks_for_too_much_is_told_about_its_own_env_runners() -> None:
    run = run_config(
        preference__collection__num_env_runners=3, preference__collection__cpus_per_env_runner=5.0,
        learner__num_learners=1, resources__num_cpus=4,
    )  # fmt: skip
    with pytest.raises(UserInputError, match=r"15.5 logical CPUs \(3 env runners × 5, 1 learners × 0.5\)"):
        check_resources(run)


def test_a_served_labeller_counts_among_them() -> None:
    run = run_config(
        preference__labels__source="vlm", serving__num_replicas=2, serving__cpus_per_replica=3.0, resources__num_cpus=4
    )
    with pytest.raises(UserInputError, match=r"6 logical CPUs \(2 replicas × 3\)"):
        check_resources(run)


def test_a_grpo_run_is_told_about_replicas_env_runners_and_learners() -> None:
    run = parse_config({"rollout": {"num_env_runners": 8, "cpus_per_env_runner": 1.0}, "resources": {"num_cpus": 4}})
    with pytest.raises(UserInputError, match=r"9 logical CPUs \(2 replicas × 0.5, 8 env runners × 1\)"):
        check_resources(run)
