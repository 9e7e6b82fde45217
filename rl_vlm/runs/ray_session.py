"""The Ray cluster of a run: a private one on this machine, or the one that RAY_ADDRESS or a Ray job names."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import ray
from ray._private import node, services
from ray._private import utils as ray_utils
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.parameter import RayParams
from ray.exceptions import AuthenticationError

from rl_vlm.config import CommonConfig
from rl_vlm.imports import replaced
from rl_vlm.monitoring.cluster_metrics import token_file
from rl_vlm.runs.memory import object_store_mib
from rl_vlm.runs.surroundings import (
    ClusterError,
    available_cpus,
    can_write,
    cannot_join,
    check_counts,
    check_resources,
    cluster_address,
    is_loopback,
    joins_cluster,
    ray_folder,
)
from rl_vlm.safe_text import one_line
from rl_vlm.types import UserInputError

# All processes of a node with this address listen on loopback only; with any other one, on every interface. `ray.init`
# would replace it by an address that other machines reach.
LOOPBACK = "127.0.0.1"

logger = logging.getLogger(__name__)


class PrivateNode(node.Node):
    """A head node on loopback without autoscaler and log monitor, and with the API server only for a dashboard: each
    process takes seconds to start. Ray has no setting for this, so its version is pinned exactly."""

    def __init__(self, ray_params: RayParams, **settings: Any) -> None:
        if settings.get("head"):
            ray_params.node_ip_address = LOOPBACK
            ray_params.no_monitor = True  # the autoscaler's process: this cluster has one node
            # It sends workers' logs to the driver, which `log_to_driver` declines.
            ray_params.include_log_monitor = False
        self.all_processes: dict[str, list[Any]] = {}  # Ray's own comes after checks that may raise
        with ExitStack() as on_failure:
            # The caller does not have this object yet and could not end what it has started.
            on_failure.callback(self.kill_all_processes, check_alive=False, wait=True)
            super().__init__(ray_params, **settings)
            on_failure.pop_all()

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Ray's own starts one without a dashboard as well, for its usage statistics."""
        if include_dashboard:
            super().start_api_server(include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)


# Ray's processes in sessions of their own: `timeout` and terminals signal a command's whole group, and a run needs Ray
# to save its checkpoint. The kernel still kills them when their parent ends.
_own_session = partial(services.ConsolePopen, start_new_session=True)
_STARTS = 4  # of a private cluster, before it is given up
_STORE_WAIT_S = "60"  # for the process with the cluster's tables; Ray's own 30 s are few on a busy machine
_NOT_STARTED = ("timed out during startup", "Timed out waiting for file")  # of the raylet; of that process
_WRONG_TOKEN = "InvalidAuthToken"  # of Ray's error where the driver sends no token, or another one
# Workers inherit these from a private cluster's processes, and get them from the job on one that was joined. One torch
# thread each, because they share the cores.
_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_DEDUP_LOGS": "1",
    # RLlib imports JAX where it is installed; nothing here uses it, and it costs every process more than a second.
    "RLLIB_TEST_NO_JAX_IMPORT": "1",
    # oneDNN, and torch's binding of it, keep what they prepared for 1,024 shapes each, up to a MiB apiece. Packed
    # micro-batches rarely repeat a shape, so that learners would grow by hundreds of MiB.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    "LRU_CACHE_CAPACITY": "16",
    # A job's own runtime environment may name some of these, which Ray would reject; the values are the same.
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
    # Actors that ask for no GPU see none: env runners, and replicas and learners on CPUs.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}


def prepare_ray() -> None:
    """Set what Ray's workers and RLlib read from the environment, where it is not set, and show only Ray's errors."""
    for name, value in _WORKER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("ray.serve", "ray.rllib", "ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _check_driver_gpu(config: CommonConfig) -> None:
    """On a joined cluster the driver cannot know which GPUs of its machine Ray gives to replicas."""
    given = "CUDA_VISIBLE_DEVICES" in os.environ  # a job's own GPUs, or the user's choice
    has_replicas = config.serves and config.serving.gpus_per_replica
    if not given and has_replicas and config.learner.num_learners == 0 and config.learner.gpus_per_learner:
        raise UserInputError(
            "learner.gpus_per_learner with learner.num_learners 0: the learner would take a GPU of the driver's "
            "machine without Ray's knowledge, perhaps a replica's. Set learner.num_learners=1."
        )


def _check_placement(config: CommonConfig, offered: Mapping[str, float]) -> None:
    if missing := sorted(config.resources.node_kinds - offered.keys()):
        raise UserInputError(
            f"resources.*_on names {', '.join(missing)} and no node of the cluster offers it: start nodes with "
            f"--resources='{{\"{missing[0]}\": 1}}', or set RL_VLM_AUTOSCALING=1 where such nodes are still to come."
        )


def _init_with_retry(**settings: Any) -> None:
    """`ray.init`, tried again: Ray gives the raylet 30 s, which a busy machine may exceed."""
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", _STORE_WAIT_S)
    for attempt in range(_STARTS):
        try:
            with replaced(node, "Node", PrivateNode), replaced(services, "ConsolePopen", _own_session):
                ray.init(**settings)
            return
        except Exception as error:  # Ray raises a plain Exception
            if not any(text in str(error) for text in _NOT_STARTED):
                raise
            ray.shutdown()
            if attempt == _STARTS - 1:
                raise ClusterError(
                    f"Ray's processes did not start in time, {_STARTS} times: the machine is overloaded, or /tmp/ray "
                    "cannot be written."
                ) from error


def _join(config: CommonConfig, common: Mapping[str, Any]) -> None:
    variables = {name: os.environ.get(name, value) for name, value in _WORKER_ENVIRONMENT.items()}
    address = cluster_address()
    try:
        with _keeping_our_signal_handler():
            ray.init(address=address, runtime_env={"env_vars": variables}, **common)
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
        if _WRONG_TOKEN in f"{error} {error.__cause__}":  # Ray says it to the innermost error only
            raise ClusterError(
                f"The Ray cluster at {address} asks for its token, as those of `ray start` do: set "
                "RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN."
            ) from error
        raise cannot_join(address, one_line(error, 1000)) from error
    _check_driver_gpu(config)
    limits = ray.cluster_resources()
    # Only a fixed cluster can be too small: an autoscaling one may still grow.
    if not os.environ.get("RL_VLM_AUTOSCALING"):
        check_counts(config, limits.get("CPU", 0), limits.get("GPU", 0))
        _check_placement(config, limits)
    if not is_token_auth_enabled() and not is_loopback(ray.util.get_node_ip_address()):
        logger.warning(
            "The Ray cluster has no token: whoever reaches its ports can run code on every node. Start it with "
            "RAY_AUTH_MODE=token."
        )


@contextmanager
def _keeping_our_signal_handler() -> Iterator[None]:
    """Keep our handler of SIGTERM, which `ray.init` replaces by one that exits at once: no checkpoint would be saved.
    Without one of ours, Ray's stays: it ends the cluster."""
    ours = signal.getsignal(signal.SIGTERM)
    if not callable(ours) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        with replaced(ray_utils, "set_sigterm_handler", lambda handler: None):
            yield
    finally:
        signal.signal(signal.SIGTERM, ours)


def _make_token() -> None:
    """A token where there is none, in the file where Ray would keep it, which Ray would let others read."""
    path = token_file()
    if not can_write(path.parent):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    else:
        with suppress(FileExistsError), open(path, "x", opener=partial(os.open, mode=0o600)) as file:
            file.write(secrets.token_hex(32))


@contextmanager
def ray_cluster(config: CommonConfig, more: Mapping[str, float] | None = None) -> Iterator[None]:
    """Connect to Ray for the length of a run. A private cluster offers `more` custom resources and ends with it."""
    if ray.is_initialized():
        yield
        return
    prepare_ray()
    common = {"namespace": "rl_vlm", "log_to_driver": False, "logging_level": logging.ERROR}
    if joins_cluster():
        _join(config, common)
    else:
        check_resources(config)
        folder, moved = ray_folder()
        if moved:
            logger.warning("%s", moved)
        token_is_given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
        if not token_is_given:
            _make_token()
        with _keeping_our_signal_handler():
            _init_with_retry(
                address="local",
                _temp_dir=str(folder),
                num_cpus=config.resources.num_cpus or available_cpus(),
                include_dashboard=config.resources.dashboard,
                object_store_memory=object_store_mib(config) << 20,
                # It is every kind of node.
                resources=dict.fromkeys(config.resources.node_kinds, 1.0) | dict(more or {}),
                **common,
            )
    try:
        yield
    finally:
        ray.shutdown()
