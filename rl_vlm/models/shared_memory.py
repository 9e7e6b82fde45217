"""Shared memory of a node: folders that do not outlive their owner, and room for a version that is being made."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import subprocess
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rl_vlm.models.tensor_bytes import mapped

MEMORY = Path("/dev/shm")
_PREFIX = "rl-vlm-weights-"
_LEAST_MEMORY = 256 << 20  # bytes of /dev/shm: a Docker container has 64 MiB by default


class OwnFolder:
    """A new folder in /dev/shm, or where that has no room among the temporary files. `close` deletes it, as do the last
    reference, Python's exit, and after a kill a shell that waits for it. What is left even so, the next owner deletes.
    """

    def __init__(self) -> None:
        self.path, lock = _claim()
        command = ["sh", "-c", 'read _; rm -rf "$0"', str(self.path)]
        watcher = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.close = weakref.finalize(self, _release, self.path, lock, watcher)

    @property
    def in_memory(self) -> bool:
        return self.path.parent == MEMORY


def _claim() -> tuple[Path, int]:
    """A new folder, and the descriptor that locks it. Folders of owners that were killed are deleted.

    The lock shows whether the owner is alive; process ids do not, because containers may share /dev/shm.
    """
    usable = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).total >= _LEAST_MEMORY
    base = MEMORY if usable else Path(tempfile.gettempdir())
    for stale in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(stale, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError while its owner lives
                shutil.rmtree(stale, ignore_errors=True)
            finally:
                os.close(descriptor)
    # Locked under a name that the clean-up above does not match, then renamed.
    draft = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base))
    descriptor = os.open(draft, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return draft.rename(draft.with_name(draft.name[1:])), descriptor


def _release(path: Path, lock: int, watcher: subprocess.Popen[bytes]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
    watcher.communicate()


class VersionRoom:
    """A new file of `size` bytes in a folder of shared memory. A thread provides its pages, which takes longer than to
    fill them."""

    def __init__(self, folder: Path, size: int) -> None:
        descriptor, name = tempfile.mkstemp(suffix=".safetensors", dir=folder)
        self.path = Path(name)
        threads = ThreadPoolExecutor(1)
        self._provided = threads.submit(_provide, self.path, descriptor, size)
        threads.shutdown(wait=False)

    def take(self) -> memoryview | None:
        """Its bytes, to be written; None where they do not fit into memory."""
        try:
            return self._provided.result()
        except OSError:
            self.path.unlink(missing_ok=True)
            return None


def _provide(path: Path, descriptor: int, size: int) -> memoryview:
    """The bytes of a new file, each page of them mapped. Raises OSError where they do not fit."""
    import torch

    try:
        os.posix_fallocate(descriptor, 0, size)  # writing to pages that are not there would end the process
    finally:
        os.close(descriptor)
    content = mapped(path, writable=True)
    torch.frombuffer(content, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()
    return content
