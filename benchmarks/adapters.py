"""How long a new adapter version takes to every replica's acknowledgement, idle and under load.

    python benchmarks/adapters.py [--quick] [--engine vllm] [--out FILE]

1, 2 and 4 replicas with fractional CPUs on one machine; adapters of about 1, 30 and 130 MB, all rank 128 on a language
model of width 512 with as many layers as the size needs (28, as Qwen3-VL-2B has, at 130 MB). Under load, every replica
generates for eight callers at a time. Seconds are the registry's: from publication to the last acknowledgement, which
carries the hash of what was loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import ray
from models import random_model
from report import Report

from rl_vlm.config import RunConfig, load_config
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.loading import load_text_side
from rl_vlm.models.reference import ModelReference
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.runs.ray_session import ray_cluster
from rl_vlm.serving.client import PolicyClient
from rl_vlm.serving.registry import registry_name
from rl_vlm.serving.service import PolicyService
from rl_vlm.types import GenerationRequest, Message, SamplingParams

RANK = 128
LAYERS = {"1 MB": 1, "30 MB": 6, "130 MB": 28}
SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 16, "num_key_value_heads": 4}
CALLERS = 8  # per replica


def configuration(folder: Path, replicas: int, engine: str, rank: int) -> RunConfig:
    """A run that only serves."""
    return load_config(
        None,
        [
            f"model.path={folder}", f"model.lora.rank={rank}", f"model.lora.alpha={rank}",
            f"serving.engine={engine}", f"serving.num_replicas={replicas}", f"serving.cpus_per_replica={1 / replicas}",
            "serving.max_context=512", "rollout.cpus_per_env_runner=0",
        ],
    )  # fmt: skip


async def publish_under_load(
    service: PolicyService, payloads: list[AdapterPayload], run: RunConfig, folder: Path, loaded: bool
) -> list[float]:
    """Seconds of each publication."""
    replicas = run.serving.num_replicas
    client = PolicyClient("bench", deadline_s=300, homes=range(replicas), coalesce=False)
    registry = ray.get_actor(registry_name("bench"))
    prompt = load_text_side(folder).codec.encode_prompt([Message.of("user", "Say something.")]).token_ids
    stop = asyncio.Event()

    async def call(number: int) -> None:
        while not stop.is_set():
            await client.generate(GenerationRequest(f"r{number}", prompt, SamplingParams(64)))

    callers = [asyncio.ensure_future(call(k)) for k in range(CALLERS * replicas if loaded else 0)]
    await asyncio.sleep(2.0)
    seconds: list[float] = []
    for payload in payloads:
        await asyncio.to_thread(service.publish, payload)
        report = await registry.report.remote(payload.version, replicas, 60.0)
        if len(report.acked) != replicas:
            raise RuntimeError(f"Version {payload.version}: {report.missing or 'a replica'} did not acknowledge.")
        seconds.append(report.seconds)
        await asyncio.sleep(0.5)
    stop.set()
    await asyncio.gather(*callers)
    return seconds


def measure(report: Report, label: str, folder: Path, replicas: int, engine: str, rank: int, repeats: int) -> None:
    """One size on one number of replicas."""
    run = configuration(folder, replicas, engine, rank)
    policy = PolicyModel(folder, run)
    with ray_cluster(run):
        service = PolicyService(run, "bench", ModelReference.of(str(folder)))
        try:
            service.wait_until_ready()
            version = 0
            for loaded in (False, True):
                payloads = []
                for _ in range(repeats + 1):
                    version += 1
                    payloads.append(policy.payload(version))
                seconds = asyncio.run(publish_under_load(service, payloads, run, folder, loaded))[1:]
                megabytes = len(payloads[0].tensors) / 1e6
                state = "loaded" if loaded else "idle"
                report.add(f"{engine}, {label}, {replicas} replica(s), {state}", seconds, MB=round(megabytes, 1))
        finally:
            service.stop()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 MB on two replicas only")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--sizes", nargs="*", choices=tuple(LAYERS), default=list(LAYERS))
    parser.add_argument("--replicas", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    report = Report("Adapter publication")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rl-vlm-bench-") as models:
        for label in ["1 MB"] if args.quick else args.sizes:
            folder = random_model(Path(models) / f"layers-{LAYERS[label]}", num_hidden_layers=LAYERS[label], **SHAPE)
            rank = RANK if label != "1 MB" else 32
            for replicas in [2] if args.quick else args.replicas:
                measure(report, label, folder, replicas, args.engine, rank, 3 if args.quick else 6)
    report.notes.append(f"took {time.monotonic() - started:.0f} s")
    report.finish(args.out)


if __name__ == "__main__":
    main()
