"""What a run finds before Ray starts: a cluster to join, CPUs and GPUs, a folder for Ray. It does not import Ray."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from rl_vlm.config import CommonConfig
from rl_vlm.machine import available_cores
from rl_vlm.types import RLVLMError, UserInputError

_CONNECT_S = 10.0
# Bytes that a process may map, most of which are never touched, and files that it may open.
_LIMITS = (("-v", resource.RLIMIT_AS, 10 << 30, "unlimited"), ("-n", resource.RLIMIT_NOFILE, 512, "4096"))
_LEAST_FREE = 64 << 20  # bytes of a folder for Ray or a cache
_LONGEST_SOCKET = 107  # characters of a Unix socket's path
_FALLBACKS = ("/tmp", "/var/tmp", "/dev/shm")
_PROBLEM = "cannot be written, is full, or is too long for the names of Ray's sockets"


class ClusterError(RLVLMError):
    """Ray's own processes did not start, or the cluster to join does not answer.

    Do: see that the cluster of `RAY_ADDRESS` runs, or unset it for a private one.
    """


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a socket that is bound to it; IPv4 addresses may be written as IPv6 ones."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def cluster_address() -> str:
    """The address that RAY_ADDRESS names; for `auto` that of `ray start` here. Raises ClusterError within seconds."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto"):
        try:  # what `ray start` wrote; Ray itself would take any cluster here, another user's private one too
            address = (_temporary() / "ray/ray_current_cluster").read_text().strip()
        except OSError:
            raise cannot_join("auto", "`ray start` has started none on this machine") from None
    if "://" in address:  # of Ray Client
        return address
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise cannot_join(address, getattr(error, "strerror", None) or error) from error
    return address


def cannot_join(address: str, reason: object) -> ClusterError:
    return ClusterError(
        f"The Ray cluster at {address} cannot be joined ({reason}): start it with `ray start --head`, name another one "
        "in RAY_ADDRESS, or unset RAY_ADDRESS for a private one."
    )


def _temporary() -> Path:
    """The folder for temporary files by Ray's rules."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def ray_folder() -> tuple[Path, str]:
    """Where a private Ray keeps its files, and a sentence if that is not where the environment says. Raises
    UserInputError."""
    longest = _LONGEST_SOCKET - len(f"/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store")
    wanted = _temporary() / "ray"
    for folder in (wanted, *(Path(other, "ray") for other in _FALLBACKS)):
        if len(str(folder)) <= longest and can_write(folder):
            return folder, "" if folder == wanted else f"Ray keeps its files in {folder}: {wanted} {_PROBLEM}."
    raise UserInputError(f"{wanted} {_PROBLEM}: set RAY_TMPDIR to a short folder that is yours.")


def can_write(folder: Path, least_free: int = _LEAST_FREE) -> bool:
    """Whether a folder, which is made where it is missing, takes files and has `least_free` bytes for them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return shutil.disk_usage(folder).free >= least_free
    except OSError:
        return False


def joins_cluster() -> bool:
    """Whether the environment names a cluster to join."""
    return bool(os.environ.get("RAY_ADDRESS") or os.environ.get("RAY_JOB_ID"))


def available_cpus() -> int:
    """Whole CPUs that this process may use, at least one."""
    return max(int(available_cores()), 1)


def gpu_sizes() -> list[float]:
    """GiB of each GPU of this machine."""
    import torch

    return [torch.cuda.get_device_properties(k).total_memory / 2**30 for k in range(torch.cuda.device_count())]


def check_limits() -> None:
    """Raise UserInputError for limits of the shell under which Ray or torch would end without a word."""
    for option, kind, lowest, enough in _LIMITS:
        if 0 <= resource.getrlimit(kind)[0] < lowest:
            raise UserInputError(
                f"Ray and torch need more than `ulimit {option}` allows here: run `ulimit {option} {enough}` first."
            )


def found_obstacles(*checks: Callable[[], object]) -> list[str]:
    """What these checks raise UserInputError for: a sentence each."""
    found = []
    for check in checks:
        try:
            check()
        except UserInputError as error:
            found.append(str(error))
    return found


def check_gpus(needed: float, here: int, size: float | None) -> None:
    """Raise UserInputError where a run needs GPUs and this machine has none."""
    if needed and not here:
        count, of = "one" if needed <= 1 else f"{needed:g}", f" of {size:g} GiB" if size else ""
        raise UserInputError(f"No GPU here: this run needs {count}{of}. `rl-vlm recipes` names those for CPUs.")


def check_resources(config: CommonConfig) -> None:
    """Raise UserInputError when a private cluster on this machine could never hold the run."""
    check_limits()
    gpus, least = gpu_sizes() if config.needed_gpus else [], config.model.least_gpu_gib
    check_gpus(config.needed_gpus, len(gpus), config.model.gpu_memory_gib)
    check_counts(config, config.resources.num_cpus or available_cpus(), len(gpus))
    if gpus and least and min(gpus) < least:
        raise UserInputError(
            f"The run is made for a GPU of {config.model.gpu_memory_gib:g} GiB and the smallest here has "
            f"{min(gpus):.1f} GiB: choose a smaller model or shorter contexts until `rl-vlm plan` says that it fits, "
            "and set model.gpu_memory_gib to what is here."
        )
    if config.serves and config.serving.expected_engine == "vllm":
        check_vllm_is_installed()


def check_vllm_is_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserInputError(
            "serving.engine is vllm and vllm is not installed: run `pip install 'rl-vlm[vllm]'` or set it to "
            "transformers."
        )


def check_counts(config: CommonConfig, cpus: float, gpus: float) -> None:
    """Raise UserInputError for a run that asks for more logical CPUs, or GPUs, than there will be."""
    asked = (("logical CPUs", "cpus", config.needed_cpus, cpus), ("GPUs", "gpus", config.needed_gpus, gpus))
    for kind, share, needed, there in asked:
        if needed > there + 1e-6:
            held = [actors for actors in config.actors if actors.count and getattr(actors, share)]
            parts = [f"{actors.count} {actors.kind} × {getattr(actors, share):g}" for actors in held]
            raise UserInputError(
                f"The run asks for {needed:g} {kind} ({', '.join(parts)}) and there are {there:g}: ask for fewer, "
                "raise resources.num_cpus, add nodes, or set RL_VLM_AUTOSCALING=1 where nodes come when asked for."
            )
