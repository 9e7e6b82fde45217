"""Run an environment in a child process that can be killed: `ProcessEnv("my/env.py", {"turns": 3})`.

An environment is foreign code: it may hang, leak, or take its process down. The child is this module run as a program;
it exchanges frames (see `wire`) over two pipes. Every call has a deadline, after which the child's process group is killed.
It protects against accidents, not against malice: the child runs with the user's own rights. Variables that hold tokens and
keys are not handed on, except those that the arguments or RL_VLM_ENV_PASS ("HF_TOKEN,OPENAI_API_KEY") name.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from rl_vlm.envs import watchdog, wire
from rl_vlm.envs.adapters.address import TOKEN_VARIABLE
from rl_vlm.envs.adapters.interfaces import split_scheme
from rl_vlm.envs.base import Info, StepResult, VisionEnv
from rl_vlm.envs.errors import EnvCrashError, EnvError, EnvTimeoutError, check_metrics, check_reset, check_step
from rl_vlm.envs.registry import portable_id
from rl_vlm.envs.worker import EnvWorker, raise_error, short_line
from rl_vlm.safe_text import child_environment
from rl_vlm.types import Split, UserInputError

PASS_VARIABLE = "RL_VLM_ENV_PASS"  # names of variables, although they hold secrets, that environments may see


class ProcessEnv(VisionEnv):
    """A VisionEnv in a child process.

    Raises EnvTimeoutError when a call takes longer than its deadline (the child is killed), EnvCrashError when the
    child died, EnvError with the one-line message of an exception in the child or for an invalid result, and
    UserInputError for wrong arguments. After a timeout or crash, `reset` starts a fresh child. `kwargs` and `info`
    are sent as JSON: tuples become lists, and values that JSON does not know their text.
    """

    def __init__(
        self,
        env_id: str,
        kwargs: dict[str, Any] | None = None,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        super().__init__()
        if not step_timeout_s > 0 or not start_timeout_s > 0:
            raise UserInputError(f"Timeouts must be positive, not {step_timeout_s} s and {start_timeout_s} s.")
        self._env_id = env_id
        self._kwargs = kwargs or {}
        self._make = {"op": "make", "env_id": portable_id(env_id), "kwargs": self._kwargs}
        wire.check_plain(env_id, self._kwargs)
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: wire.Channel | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._start()

    @property
    def pid(self) -> int | None:
        """The child's process id; None when there is no child."""
        return self._process.pid if self._process else None

    def num_items(self, split: Split) -> int | None:
        """See VisionEnv."""
        return self._call({"op": "num_items", "split": split}, self._start_timeout_s)[0]["value"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """See VisionEnv."""
        super().reset(seed=seed)
        if self._process is None:
            self._start()
        reply, blobs = self._call({"op": "reset", "seed": seed, "options": options}, self._step_timeout_s)
        return check_reset((self._observation(reply, blobs), reply.get("info")))

    def step(self, action: str) -> StepResult:
        """See VisionEnv."""
        reply, blobs = self._call({"op": "step", "action": action}, self._step_timeout_s)
        flags = (reply.get("reward"), reply.get("terminated"), reply.get("truncated"), reply.get("info"))
        return check_step((self._observation(reply, blobs), *flags))

    def close(self) -> None:
        """Let the child close its environment, briefly, and end it."""
        if self._channel is not None:
            try:
                self._channel.send({"op": "close"}, timeout_s=1.0)
                self._channel.receive(timeout_s=2.0)
            except (TimeoutError, wire.PeerGoneError, wire.FrameError):
                pass  # it is killed below in any case
        self._kill()

    def _start(self) -> None:
        child_reads, parent_writes = os.pipe()
        parent_reads, child_writes = os.pipe()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        mark = f"RL_VLM_ENV_{secrets.token_hex(8)}"  # tells the environment's processes from all others
        process = subprocess.Popen(
            [sys.executable, "-m", "rl_vlm.envs.isolation", str(child_reads), str(child_writes), mark],
            stdin=subprocess.DEVNULL,
            stdout=2,  # output of the environment must not mix with ours
            pass_fds=(child_reads, child_writes),
            start_new_session=True,  # a process group of its own, which can be killed whole and does not get the terminal's Ctrl-C
            env=child_environment(self._wanted_secrets(), PYTHONPATH=path, **{mark: "1"}),
        )
        os.close(child_reads)
        os.close(child_writes)
        self._process = process
        self._channel = wire.Channel(parent_reads, parent_writes, alive=lambda: _alive(process.pid))
        self._finalizer = weakref.finalize(self, _end, process, self._channel, mark)
        reply, _ = self._call(self._make, self._start_timeout_s)
        try:
            self.metrics = check_metrics(reply.get("metrics", {}))  # type: ignore[misc]  # those of this child's environment
        except EnvError as error:
            raise self._protocol_error(error) from error

    def _wanted_secrets(self) -> set[str]:
        """The variables with secrets that the environment needs: those that its arguments or RL_VLM_ENV_PASS name."""
        wanted = set(os.environ.get(PASS_VARIABLE, "").replace(",", " ").split())
        wanted |= {value for value in self._kwargs.values() if isinstance(value, str)}
        if "://" in self._env_id or split_scheme(self._env_id) is not None:
            wanted.add(TOKEN_VARIABLE)  # it runs elsewhere, and this is the token of that place
        return wanted

    def _call(self, request: dict[str, Any], timeout_s: float) -> tuple[dict[str, Any], list[bytes]]:
        if self._channel is None or self._process is None:
            raise EnvCrashError(f"{self._env_id}: the process is gone; call reset() for a new one.")
        what = f"{self._env_id}: {request['op']}"
        deadline = time.monotonic() + timeout_s
        try:
            self._channel.send(request, timeout_s=timeout_s)
            reply, blobs = self._channel.receive(deadline - time.monotonic())
        except TimeoutError as error:
            self._kill()
            raise EnvTimeoutError(f"{what} took longer than {timeout_s:g} s; the process was killed.") from error
        except wire.PeerGoneError as error:
            raise EnvCrashError(f"{what}: the process died ({self._kill(grace_s=1.0)}).") from error
        except wire.FrameError as error:
            raise self._protocol_error(error) from error
        if "error" in reply and request["op"] == "make":
            self._kill()
        raise_error(reply, what)
        return reply, blobs

    def _observation(self, reply: dict[str, Any], blobs: list[bytes]) -> Any:
        try:
            return wire.unpack_observation(reply.get("messages"), blobs)
        except wire.FrameError as error:
            raise self._protocol_error(error) from error

    def _protocol_error(self, error: wire.FrameError | EnvError) -> EnvCrashError:
        self._kill()
        return EnvCrashError(f"{self._env_id}: the process sent an invalid message ({error}) and was killed.")

    def _kill(self, grace_s: float = 0.0) -> str:
        """Kill the child's process group if it has not ended after `grace_s`; return how the child ended, in words."""
        process, self._process, self._channel = self._process, None, None
        if process is None or self._finalizer is None:
            return "it was gone already"
        deadline = time.monotonic() + grace_s
        while _alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._finalizer()
        code = process.returncode
        return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen[bytes], channel: wire.Channel, mark: str) -> None:
    """Kill a child and all that it started, reap the child and close its pipes."""
    watchdog.kill_marked(mark)
    try:
        os.killpg(process.pid, signal.SIGKILL)  # before the child is reaped, so that its id cannot name another group
    except ProcessLookupError:
        pass  # the whole group has gone already
    process.wait()
    watchdog.kill_marked(mark)  # what was started while the others were killed
    channel.close()


def _alive(pid: int) -> bool:
    """Whether a child runs; it is not reaped, so its id stays taken."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _serve(read_fd: int, write_fd: int, mark: str) -> None:
    """Answer requests until the parent closes the pipe or asks to close."""
    script = str(Path(watchdog.__file__))
    subprocess.Popen([sys.executable, "-I", "-S", script, str(read_fd), str(os.getpid()), mark], pass_fds=(read_fd,))
    channel = wire.Channel(read_fd, write_fd)
    worker = EnvWorker()
    while True:
        try:
            request, _ = channel.receive()
        except wire.PeerGoneError:
            return
        reply, blobs = worker.answer(request)
        try:
            channel.send(reply, blobs)
        except (wire.FrameError, ValueError, TypeError, RecursionError) as error:  # info that JSON cannot hold
            channel.send({"kind": "env", "error": f"the reply cannot be sent ({short_line(error)})"})
        if request["op"] == "close":
            return


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
