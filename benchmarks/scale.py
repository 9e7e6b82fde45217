"""Where one driver, registry and router bend: real code, with simulated engines, replicas and env runners.

    python benchmarks/scale.py [--quick] [--out FILE]

- router: decisions per second of `AffinityRouter` over N replicas, of new work and of conversations (one process).
- registry: seconds from a publication until N replicas have acknowledged it. Loading takes no time, and the payload's
  bytes, which travel by Ray's object store, are not counted.
- rounds, groups: the driver's CPU seconds per group, and groups per second, of `Sampler` with shards and with single
  tasks, and of `GroupBuffer`, with N env runners. A group has 8 episodes of 512 tokens and takes 2 s (log-normal).
  The driver only receives here: its limit in groups per second is 1 / CPU seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from types import SimpleNamespace
from typing import Any

import ray
from report import Report, command_line
from simulated import HOSTS, ReplicaHost, runners

from rl_vlm.models.weights import AdapterPayload
from rl_vlm.rollout.rollouts import GroupBuffer
from rl_vlm.rollout.sampler import Sampler
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.serving.registry import Published, start_registry
from rl_vlm.serving.router import AffinityRouter, home_session
from rl_vlm.types import POLICY

GROUP_S, LAG = 2.0, 2


def tasks(count: int, start: int = 0, version: int = 0) -> list[RolloutTask]:
    """`count` tasks of 8 episodes."""
    return [RolloutTask(f"{start + k:09d}", k, "train", k, k, 8, 1.0, version) for k in range(count)]


def router(report: Report, replicas: int, seconds: float) -> None:
    """Decisions per second, with queue lengths that change."""
    chosen = random.Random(0)
    candidates = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=f"{chosen.getrandbits(40):08x}")) for _ in range(replicas)
    ]
    known = {id(one.replica_id): chosen.randrange(8) for one in candidates}
    state: Any = SimpleNamespace(
        _turn=itertools.count(), replica_queue_len_cache=SimpleNamespace(get=lambda replica: known[id(replica)])
    )
    sessions = {
        "new work": [home_session(k) for k in range(64)],
        "conversations": [chosen.choice(candidates).replica_id.unique_id for _ in range(64)],
    }

    async def decide(wanted: list[str]) -> float:
        requests = [
            SimpleNamespace(routing_context=SimpleNamespace(), metadata=SimpleNamespace(session_id=one))
            for one in wanted
        ]
        done, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            await AffinityRouter.choose_replicas(state, candidates, requests[done % 64])  # type: ignore[arg-type]
            done += 1
        return done / (time.perf_counter() - started)

    for name, wanted in sessions.items():
        rates = [asyncio.run(decide(wanted)) for _ in range(3)]
        report.add(f"router, {replicas} replicas, {name}", rates, "decisions/s")


def versions(count: int) -> list[Published]:
    """Publications of a small adapter."""
    payloads = [AdapterPayload(k, bytes(64), "{}", f"{k:064x}") for k in range(1, count + 1)]
    return [Published(payload.version, payload.sha256, ray.put(payload)) for payload in payloads]


def registry(report: Report, replicas: int, count: int) -> None:
    """Publication latency over Ray."""
    actor = start_registry(f"scale-{replicas}", "scale")
    ray.get(actor.join.remote(POLICY), timeout=60)
    hosts = [ReplicaHost.remote() for _ in range(HOSTS)]
    names = [f"replica{k}" for k in range(replicas)]
    running = [host.run.remote(actor, names[k::HOSTS]) for k, host in enumerate(hosts)]
    seconds = []
    try:
        deadline = time.monotonic() + 60
        while len(ray.get(actor.status.remote(), timeout=60)["replicas"]) < replicas and time.monotonic() < deadline:
            time.sleep(0.2)
        for published in versions(count):
            started = time.perf_counter()
            ray.get(actor.publish.remote(published), timeout=60)
            done = ray.get(actor.report.remote(published.version, replicas, 60.0), timeout=90)
            seconds.append(time.perf_counter() - started)
            if len(done.acked) < replicas:
                report.notes.append(f"registry, {replicas} replicas: {len(done.acked)} acknowledged within 60 s.")
        ray.get([host.stop.remote() for host in hosts], timeout=60)
        ray.get(running, timeout=60)
    finally:
        for one in (actor, *hosts):
            ray.kill(one)
    report.add(f"registry, {replicas} replicas", seconds)


def rounds(report: Report, count: int, repeats: int) -> None:
    """Whole rounds of one group per runner."""
    env_runners, hosts = runners(count, GROUP_S)
    sampler = Sampler(env_runners, sharded=True)
    cpu, rates = [], []
    for _ in range(repeats):
        wall, used = time.perf_counter(), time.process_time()
        sampler.give(tasks(count), 600.0)
        assert len(sampler.finish().groups) == count
        cpu.append((time.process_time() - used) / count)
        rates.append(count / (time.perf_counter() - wall))
    _tell(report, "rounds", count, cpu, rates, hosts)


def continuous(report: Report, count: int, repeats: int) -> None:
    """Groups as they come, at lag 2: every runner has one under way, and a sixteenth of them makes a batch."""
    env_runners, hosts = runners(count, GROUP_S)
    sampler, buffer = Sampler(env_runners, sharded=False), GroupBuffer(LAG)
    batch = max(count // 16, 1)
    cpu, rates, given = [], [], itertools.count(0, count)
    sampler.give(tasks(count, next(given)), 600.0, 0)
    version = 0
    for _ in range(repeats):
        wall, used, learned = time.perf_counter(), time.process_time(), 0
        while learned < count:
            found = sampler.collect(version, 0.5)
            buffer.add(found.groups)
            sampler.give(tasks(len(found.groups), next(given), version), 600.0, version)
            while len(buffer) >= batch and learned < count:
                # Versions of a learner that is never late: an age is not what is measured here.
                learned += len(buffer.take(batch, version)[0])
        cpu.append((time.process_time() - used) / learned)
        rates.append(learned / (time.perf_counter() - wall))
    _tell(report, "groups", count, cpu, rates, hosts)


def _tell(report: Report, kind: str, count: int, cpu: list[float], rates: list[float], hosts: list[Any]) -> None:
    """The figures of so many runners, which end."""
    for host in hosts:
        ray.kill(host)
    report.add(f"{kind}, {count} runners, driver's CPU per group", [1e3 * one for one in cpu], "ms")
    report.add(f"{kind}, {count} runners", rates, "groups/s")


def measure(quick: bool) -> Report:
    """Run everything and return the report."""
    report = Report("Scale: real driver, registry and router with simulated replicas and env runners")
    replicas, env_runners = ((2, 20), (10, 100)) if quick else ((10, 100, 1000), (10, 100, 1000, 10_000))
    for count in replicas:
        router(report, count, 0.1 if quick else 1.0)
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        for count in replicas:
            registry(report, count, 2 if quick else 5)
        for count in env_runners:
            rounds(report, count, 1 if quick else 3)
            continuous(report, count, 1 if quick else 3)
    finally:
        ray.shutdown()
    median = {row["label"]: float(row["median"]) for row in report.rows}
    few, many = env_runners[0], env_runners[-1]
    for kind in ("rounds", "groups"):
        per_group = [median[f"{kind}, {count} runners, driver's CPU per group"] for count in (few, many)]
        report.ratios[f"{kind}: CPU per group, {few} over {many} runners"] = per_group[0] / per_group[1]
    report.notes.append(
        f"Times of the hosts are {GROUP_S:g} s per group (median); {HOSTS} processes simulate all of them."
    )
    return report


def main() -> None:
    """Measure, print, and write JSON."""
    args = command_line(__doc__, "small numbers: half a minute").parse_args()
    measure(args.quick).finish(args.out)


if __name__ == "__main__":
    main()
