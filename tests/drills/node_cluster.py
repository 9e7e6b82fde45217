"""A Ray cluster of several nodes on one machine that share nothing by accident.

Each node is a network namespace with an address of its own on a private bridge, and a mount namespace with its own temporary
folder, /dev/shm, home and caches. Links can be cut or made slow; a node is killed with everything in it. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import psutil
from jobs import RAY, JobClient
from ports import free_ports
from runs import environment

_READY_S = 300.0
_STARTS = 3  # Ray gives its own processes 30 s to come up, which a busy machine may not keep


_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "ethtool": "ethtool", "redis-server": "redis-server"}  # Debian's


def what_is_missing() -> str:
    """Why the nodes cannot be made here, in a sentence; empty where they can."""
    missing = {package for program, package in _PACKAGES.items() if shutil.which(program) is None}
    if missing:
        return f"The drills need programs that are not installed: apt-get install {' '.join(sorted(missing))}."
    made = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False).returncode == 0
    return "" if os.geteuid() == 0 and made else "The drills make network namespaces: run them as root."


def _run(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, timeout=30)


def _ip(*arguments: object) -> None:
    _run("ip", *arguments)


@dataclass(slots=True)
class Node:
    """One node: its address, its folder (home, caches, temporary files), and what runs in it."""

    name: str
    address: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    everyone: dict[int, psutil.Process] = field(default_factory=dict)

    def processes(self, title: str = "") -> list[psutil.Process]:
        """The node's processes whose command line begins with `title`."""
        assert self.process is not None
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self.everyone.update({child.pid: child for child in children})
        found = []
        for child in self.everyone.values():
            try:
                if (
                    child.is_running()
                    and child.status() != psutil.STATUS_ZOMBIE
                    and " ".join(child.cmdline()).startswith(title)
                ):
                    found.append(child)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def signal(self, number: int) -> None:
        """Send a signal to everything in the node."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it went by itself, as children of the killed do
                process.send_signal(number)
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """The node is gone, as by a power cut."""
        self.signal(signal.SIGKILL)
        self.signal(signal.SIGKILL)  # what was started meanwhile
        if self.process is not None:
            self.process.wait(30)

    def cache(self) -> list[str]:
        """Names in the node's own cache folder."""
        folder = self.folder / "home/.cache/rl_vlm"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


class NodeCluster(JobClient):
    """A head without CPUs for work, and workers. `cpus[k]` and `resources[k]` are those of worker k."""

    def __init__(self, cpus: list[float], resources: list[str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rln-"))
        self.token = secrets.token_hex(32)
        (self.folder / "token").write_text(self.token)
        self._tag = secrets.token_hex(2)
        self._bridge = f"rlv{self._tag}"
        self._subnet = f"10.{100 + secrets.randbelow(100)}.{secrets.randbelow(250)}"
        self._cpus, self._resources = cpus, resources or ["{}"] * len(cpus)
        self._storage: subprocess.Popen[bytes] | None = None
        self._slow: subprocess.Popen[bytes] | None = None  # the program that slows a node's link
        self._head_variables: dict[str, str] = {}
        self._mounted = self.folder / "tmp"  # every node has its own folder here
        self._mounted.mkdir()
        names = ["head", *(f"worker{k}" for k in range(len(cpus)))]
        self.nodes = [Node(name, f"{self._subnet}.{k + 10}", self.folder / name) for k, name in enumerate(names)]
        self.gcs, self.port = free_ports(2)
        self.address, self.dashboard = f"{self.head.address}:{self.gcs}", f"http://{self.head.address}:{self.port}"

    @property
    def head(self) -> Node:
        """The node of the GCS and the dashboard."""
        return self.nodes[0]

    @property
    def workers(self) -> list[Node]:
        """The other nodes."""
        return self.nodes[1:]

    @property
    def variables(self) -> dict[str, str]:
        """The environment of whoever may use the cluster."""
        return environment(
            RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(self.folder / "token"), RAY_API_SERVER_ADDRESS=self.dashboard,
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        )  # fmt: skip

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self._subnet}.1/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            _run("ethtool", "-K", self._bridge, "tx", "off")
            for place, node in enumerate(self.nodes):
                self._connect(place, node)
            self._start_storage()
            self.start(self.head)
            self._wait(1)
            for node in self.workers:
                self.start(node)
            self._wait(len(self.nodes))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_storage(self) -> None:
        """What the head knows survives it in a Redis of its own outside the nodes."""
        host, (port,) = f"{self._subnet}.1", free_ports(1)  # reached over the bridge of this machine only
        settings = self.folder / "redis.conf"
        settings.write_text(f'bind {host}\nport {port}\nsave ""\nprotected-mode no\ndir {self.folder}\n')
        with open(self.folder / "redis.log", "w") as log:
            self._storage = subprocess.Popen(["redis-server", settings], stdout=log, stderr=subprocess.STDOUT)
        self._head_variables = {"RAY_REDIS_ADDRESS": f"{host}:{port}"}

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node.process is not None:
                node.kill()
            subprocess.run(["ip", "netns", "del", self._namespace(node)], capture_output=True, check=False)
        for process in (self._storage, self._slow):
            if process is not None:
                process.kill()
                process.wait(30)
        for link in (f"s{self._tag}", self._bridge):
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)

    def _namespace(self, node: Node) -> str:
        return f"rlv-{self._tag}-{node.name}"

    def _link(self, place: int) -> str:
        return f"v{self._tag}{place}"

    def _connect(self, place: int, node: Node) -> None:
        name, outer, inner = self._namespace(node), self._link(place), f"i{self._tag}{place}"
        _ip("netns", "add", name)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        _ip("link", "set", inner, "netns", name)
        _ip("link", "set", outer, "master", self._bridge)
        _ip("link", "set", outer, "up")
        _ip("-n", name, "addr", "add", f"{node.address}/24", "dev", inner)
        _ip("-n", name, "link", "set", inner, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        # A slow link carries frames in user space: each must be whole, with its checksum.
        whole = ["tx", "off", "tso", "off", "gso", "off", "gro", "off"]
        _run("ip", "netns", "exec", name, "ethtool", "-K", inner, *whole)
        _run("ethtool", "-K", outer, *whole)
        for part in ("tmp", "home"):
            (node.folder / part).mkdir(parents=True)

    def start(self, node: Node) -> None:
        """Start Ray on a node that is new, or was killed."""
        if node is self.head:
            role = [
                "--head", f"--port={self.gcs}", "--num-cpus=0", "--dashboard-host=0.0.0.0", f"--dashboard-port={self.port}",
                "--include-dashboard=true",
            ]  # fmt: skip
        else:
            place = self.workers.index(node)
            role = [
                f"--address={self.address}",
                f"--num-cpus={self._cpus[place]:g}",
                f"--resources={self._resources[place]}",
            ]
        ray = [
            RAY, "start", "--block", f"--node-ip-address={node.address}", "--object-store-memory=200000000",
            "--disable-usage-stats", f"--temp-dir={self._mounted}", *role,
        ]  # fmt: skip
        # Everything is mounted in a namespace of the node's own, and goes with it. Ray's drivers look for their raylet among
        # all processes that they see, and take the head's where they see it: so processes have a namespace too.
        # The homes of the other nodes are hidden, or a model would be read from there.
        others = [f"mount -t tmpfs -o size=1m tmpfs {other.folder}" for other in self.nodes if other is not node]
        own = [f"mount --bind {node.folder}/tmp {self._mounted}", "mount -t tmpfs -o size=400m tmpfs /dev/shm"]
        inside = " && ".join([*own, *others, 'exec "$@"'])
        command = [
            "ip",
            "netns",
            "exec",
            self._namespace(node),
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            inside,
            "sh",
            *map(str, ray),
        ]
        variables = {
            **self.variables,
            "HOME": str(node.folder / "home"),
            "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
        }
        if node is self.head:
            variables |= self._head_variables
        with open(node.folder / "ray.log", "a") as log:
            node.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )

    def _wait(self, count: int) -> None:
        deadline = time.monotonic() + _READY_S
        starts = 0
        while len(self.alive()) < count:
            if starts < _STARTS:
                starts += self.revive()
            if time.monotonic() > deadline:
                logs = "\n".join((node.folder / "ray.log").read_text()[-1000:] for node in self.nodes if node.process)
                raise TimeoutError(f"{len(self.alive())} of {count} nodes came:\n{logs}")
            time.sleep(0.5)

    def revive(self) -> int:
        """Start again the nodes whose Ray has ended, and say how many they were."""
        gone = [node for node in self.nodes if node.process is not None and node.process.poll() is not None]
        for node in gone:
            node.kill()
            self.start(node)
        return len(gone)

    def alive(self) -> list[str]:
        """Addresses of the nodes that the cluster believes to be alive."""
        try:
            answer = self.get("/api/v0/nodes?limit=100&detail=true")
            found = answer.json()["data"]["result"]["result"]
        except (httpx.HTTPError, KeyError, TypeError, ValueError):
            return []
        return [node["node_ip"] for node in found if node["state"] == "ALIVE"]

    def remember(self) -> None:
        """Note all processes."""
        for node in self.nodes:
            if node.process is not None:
                node.processes()

    # Faults.

    def slow(self, node: Node, delay_s: float, lost: float) -> None:
        """Frames to and from a node take `delay_s` longer each way, and a share of them is lost, until `restore`."""
        link, inside, outside = self._link(self.nodes.index(node)), f"s{self._tag}", f"t{self._tag}"
        _ip("link", "add", inside, "type", "veth", "peer", "name", outside)
        _run("ethtool", "-K", outside, "tx", "off")
        Path(f"/proc/sys/net/ipv4/conf/{link}/arp_ignore").write_text(
            "1"
        )  # this machine is not the node's neighbour there
        _ip("link", "set", link, "nomaster")
        _ip("link", "set", outside, "master", self._bridge)
        for name in (inside, outside):
            _ip("link", "set", name, "up")
        program = Path(__file__).with_name("slow_link.py")
        self._slow = subprocess.Popen([sys.executable, program, link, inside, f"{delay_s}", f"{lost}"])

    def restore(self, node: Node) -> None:
        """The node's link is as it was."""
        if self._slow is not None:
            self._slow.kill()
            self._slow.wait(30)
            self._slow = None
            _ip("link", "del", f"s{self._tag}")
            _ip("link", "set", self._link(self.nodes.index(node)), "master", self._bridge)

    def cut(self, node: Node, *, cut: bool = True) -> None:
        """Cut a node off, or connect it again."""
        _ip("link", "set", self._link(self.nodes.index(node)), "down" if cut else "up")
