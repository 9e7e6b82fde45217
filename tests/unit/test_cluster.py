"""What a run asks of its cluster, in words. Nothing is started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from preference_loop import run_config
from ray._private import utils as ray_utils
from ray.exceptions import AuthenticationError

from rl_vlm.cli.output import log_to_stderr
from rl_vlm.config import parse_config
from rl_vlm.runs import ray_session
from rl_vlm.runs.lifecycle import StopRequest
from rl_vlm.runs.ray_session import check_resources, ray_cluster
from rl_vlm.types import UserInputError


def test_a_preference_run_that_asks_for_too_much_is_told_about_its_own_env_runners() -> None:
    run = run_config(
        preference__collection__num_env_runners=3, preference__collection__cpus_per_env_runner=5.0,
        learner__num_learners=1, resources__num_cpus=4,
    )  # fmt: skip
    with pytest.raises(UserInputError, match=r"15.5 logical CPUs \(3 env runners × 5, 1 learners × 0.5\)"):
        check_resources(run)


def test_a_grpo_run_is_told_about_replicas_env_runners_and_learners() -> None:
    run = parse_config({"rollout": {"num_env_runners": 8, "cpus_per_env_runner": 1.0}, "resources": {"num_cpus": 4}})
    with pytest.raises(UserInputError, match=r"9 logical CPUs \(2 replicas × 0.5, 8 env runners × 1\)"):
        check_resources(run)


@pytest.fixture
def ray_that_takes_sigterm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`ray.init` without a cluster, which like Ray's own installs a handler that exits at once."""

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray_session.ray, "init", init)
    for name, answer in {"is_initialized": False, "shutdown": None, "cluster_resources": {"CPU": 64.0}}.items():
        monkeypatch.setattr(ray_session.ray, name, lambda answer=answer: answer)
    for name in ("RAY_ADDRESS", "RAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray_session, "cluster_address", lambda: os.environ["RAY_ADDRESS"])
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("address", ["", "127.0.0.1:6379"])
def test_a_run_keeps_its_handler_of_sigterm(
    address: str, ray_that_takes_sigterm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    caught = []
    signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    with ray_session.ray_cluster(run_config()):
        signal.raise_signal(signal.SIGTERM)
    assert caught == [signal.SIGTERM]


@pytest.mark.parametrize(("token", "warned"), [(False, True), (True, False)])
def test_a_joined_cluster_without_a_token_is_warned_about_where_it_is_seen(
    token: bool,
    warned: bool,
    ray_that_takes_sigterm: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    monkeypatch.setattr(ray_session, "is_token_auth_enabled", lambda: token)
    monkeypatch.setattr(ray_session.ray.util, "get_node_ip_address", lambda: "192.0.2.7")
    log_to_stderr()
    with ray_cluster(parse_config({})):
        pass
    assert ("has no token" in capsys.readouterr().err) == warned


RAYLET = "The current node timed out during startup. This could happen because ..."
STORE_WAIT = "RAY_gcs_server_port_wait_time_s"
STORE = "Timed out waiting for file /tmp/ray/session_1/gcs_server_port_2."


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception]]:
    """What the next calls of `ray.init` raise, first one first; then it succeeds."""
    errors: list[Exception] = []

    def init(**settings: object) -> None:
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(ray_session.ray, "init", init)
    monkeypatch.setattr(ray_session.ray, "shutdown", lambda: None)
    monkeypatch.delenv(STORE_WAIT, raising=False)
    yield errors


def test_a_private_cluster_on_a_busy_machine_is_started_again(starts: list[Exception]) -> None:
    starts += [Exception(RAYLET), RuntimeError(STORE), Exception(RAYLET)]
    ray_session._init_with_retry()
    assert not starts
    assert os.environ[STORE_WAIT] == "60"


def test_a_cluster_that_asks_for_a_token_is_an_error_in_one_sentence(
    starts: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts.append(AuthenticationError("Token authentication is enabled and no token was found.\nSee ..."))
    monkeypatch.setattr(ray_session, "cluster_address", lambda: "192.0.2.7:6379")
    with pytest.raises(ray_session.ClusterError):
        ray_session._join(run_config(), (), {})


@pytest.mark.parametrize("address", ["", "127.0.0.1:6379"])
def test_a_run_that_is_told_to_stop_while_ray_starts_hears_it(
    address: str, ray_that_takes_sigterm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray job stop` during the start: Ray's handler would end it as a failure, with code 15."""

    def init(**_: object) -> None:
        ray_utils.set_sigterm_handler(lambda number, _: sys.exit(number))  # as the first thing that Ray does
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray_session.ray, "init", init)
    stop = StopRequest()
    with stop.installed(lambda _: None), pytest.raises(KeyboardInterrupt), ray_session.ray_cluster(run_config()):
        pass
    assert stop.signal == signal.SIGTERM
