"""benchmarks/trl_loop.py: TRL takes whole steps on the same prompts, with the reward and the schedule of the run."""

import importlib
from pathlib import Path

import pytest

from rl_vlm.config import parse_config
from rl_vlm.types import UserInputError

pytestmark = pytest.mark.slow

OVERRIDES = {
    "env": {"kwargs": {"num_train": 8, "num_test": 4}},
    "rollout": {"prompts_per_iteration": 2, "group_size": 2, "max_new_tokens_per_turn": 4},
    "algorithm": {"iterations": 2, "minibatches": 2, "advantage_normalization": "none", "advantage_scale": 2.0},
    "learner": {"lr": 1e-3, "lr_schedule": "linear", "lr_final_fraction": 0.1},
}


def run_config(**sections):
    merged = {name: {**section, **sections.get(name, {})} for name, section in OVERRIDES.items()}
    return parse_config({**sections, **merged})


@pytest.fixture(scope="module")
def module():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        yield importlib.import_module("trl_loop")


@pytest.fixture(scope="module")
def loop(module, tiny_folder):
    return module.TRLLoop(tiny_folder, run_config())


def test_steps_are_whole_and_follow_the_schedule_to_its_end(loop):
    for number in (1, 2):
        measured = loop.step()
        assert loop.trainer.state.global_step == 2 * number
        assert measured["total"] == pytest.approx(measured["sample"] + measured["learn"])
        assert 0 < measured["sample"] < measured["total"]
    assert loop.trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    for _ in range(2):
        with pytest.raises(UserInputError, match=r"algorithm\.iterations"):
            loop.step()


def test_settings_that_trl_lacks_are_refused(module, tmp_path):
    for algorithm in ({"advantage_normalization": "std"}, {"kl_coef": 0.1, "kl_estimator": "k2"}):
        with pytest.raises(UserInputError, match="TRL"):
            module.grpo_arguments(run_config(algorithm={**OVERRIDES["algorithm"], **algorithm}), str(tmp_path), [])
