"""GeoSpot-v0: what it shows, pays and reports, and which arguments it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from rl_vlm.envs.errors import check_reset, check_step
from rl_vlm.envs.registry import make
from rl_vlm.rollout.metrics import declared_metrics
from rl_vlm.types import EncodedImage, Trajectory, TrajectoryStatus
from rl_vlm.zoo.geospot.environment import GeoSpotEnv
from rl_vlm.zoo.geospot.places import FARTHEST_KM, haversine_km

RIGHT = "City: {city}\nRegion: {region}\nCountry: {country}\nLatitude: {latitude}\nLongitude: {longitude}"


def play(env: GeoSpotEnv, index: int, answer: str | None = None) -> tuple[float, dict[str, Any]]:
    """The reward and info of one episode; by default the answer is right."""
    env.reset(options={"index": index, "split": "train"})
    assert env._truth is not None
    truth = {**env._truth.names, "latitude": env._truth.position[0], "longitude": env._truth.position[1]}
    _, reward, terminated, truncated, info = check_step(env.step(RIGHT.format(**truth) if answer is None else answer))
    assert terminated and not truncated
    return reward, info


def test_a_right_answer_pays_one_on_every_map() -> None:
    env = GeoSpotEnv()
    for index in range(200):
        reward, info = play(env, index)
        assert reward == pytest.approx(1.0), info
        assert info["correct"] and info["format_ok"] and info["within_25km"]


def test_what_it_reports() -> None:
    env = make("GeoSpot-v0", countries=8, cities=1, stage=3)
    observation, opening = check_reset(env.reset(seed=0, options={"index": 3, "split": "test"}))
    assert isinstance(observation.messages[0].parts[0], EncodedImage)
    assert "Latitude: <degrees" in str(observation.messages[0].parts[1])
    assert opening["distance_km"] == FARTHEST_KM and opening["format_ok"] is False
    answer = "City: Sydney\nRegion: New South Wales\nCountry: AU\nLatitude: -33.9\nLongitude: 151.2"
    reward, info = check_step(env.step(answer))[1], env.reset()[1]
    env.reset(options={"index": 3, "split": "test"})
    info = env.step(answer)[4]
    assert info["reward"] == reward
    assert info["response"] == answer
    assert info["stage"] == 3 and info["stage_weights"] == {"country": 0.2, "region": 0.3, "city": 0.3, "coords": 0.3}
    assert info["parsed"] == {
        "city": "Sydney", "region": "New South Wales", "country": "AU", "coords": (-33.9, 151.2), "format_valid": True,
    }  # fmt: skip
    truth = info["ground_truth"]
    assert info["d_coords"] == pytest.approx(haversine_km((-33.9, 151.2), (truth["latitude"], truth["longitude"])))
    assert info["distance_km"] == info["d_coords"]
    assert {f"{kind}_{field}" for kind in "dk" for field in ("country", "region", "city", "coords")} <= info.keys()


def test_without_coordinates_the_distance_is_the_farthest() -> None:
    reward, info = play(GeoSpotEnv(), 0, "I cannot tell.")
    assert reward == 0.0
    assert info["d_coords"] is None and info["distance_km"] == FARTHEST_KM
    assert not info["within_500km"]


def test_stages_weights_and_kernels_change_the_reward() -> None:
    country_only = "Country: {country}"
    rewards = {}
    for name, kwargs in {
        "first": {"stage": 0}, "last": {}, "between": {"stage": 2.5}, "weights": {"weights": (1, 1, 0)}, "loose": {"taus": {"coords": 1e6}},
    }.items():  # fmt: skip
        env = GeoSpotEnv(**kwargs)  # type: ignore[arg-type]
        env.reset(options={"index": 1, "split": "train"})
        assert env._truth is not None
        said = country_only.format(**env._truth.names) + "\nLatitude: 0\nLongitude: 0" * (name == "loose")
        rewards[name] = env.step(said)[1]
    assert rewards["first"] == pytest.approx(1.0)
    assert rewards["last"] == pytest.approx(0.15 / 1.2)
    assert rewards["between"] == pytest.approx(0.25 / 0.925)
    assert rewards["weights"] == pytest.approx(1 / 2.5)
    assert rewards["loose"] == pytest.approx((0.15 + 0.4) / 1.2, abs=0.01)


def _episode(info: dict[str, Any]) -> Trajectory:
    import numpy as np

    empty = np.zeros(1)
    return Trajectory(
        "a",
        empty.astype(np.int32),
        empty.astype(bool),
        empty.astype(np.float32),
        (),
        TrajectoryStatus.COMPLETED,
        (),
        info,
    )


def test_declared_metrics_become_figures() -> None:
    infos = [{"distance_km": float(k), "format_ok": k > 2, "other": 1.0, "stage_idx": None} for k in range(11)]
    figures = declared_metrics(GeoSpotEnv.metrics, infos)
    assert figures == {
        "env/distance_km": 5.0, "env/distance_km_p50": 5.0, "env/distance_km_p90": 9.0, "env/format_ok": pytest.approx(8 / 11),
    }  # fmt: skip
    assert declared_metrics(GeoSpotEnv.metrics, []) == {}
