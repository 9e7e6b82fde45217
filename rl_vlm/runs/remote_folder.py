"""A run folder on object storage (s3://, gs://, abfs://, ...): written here, copied there while the run goes on.

Object stores neither append nor rename, so a run writes to a folder of this machine, and what has changed is
uploaded every half minute and at the end. `index.json` there is written last and names the files of one moment: a
copy that was cut short leaves the moment before.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from rl_vlm.files import cache_folder
from rl_vlm.ownership import RUN_MARKER, run_files
from rl_vlm.safe_text import one_line
from rl_vlm.types import RLVLMError, UserInputError
from rl_vlm.waiting import retried

logger = logging.getLogger(__name__)

RunDir = str | Path  # a folder, or a URL of remote storage

PUSH_EVERY_S = 30.0
_LAST_COPY_S = 30.0  # for which the last copy is tried again
_LISTINGS = 5  # of the folder in one copy, before it waits for the next
_INDEX = "index.json"
_UNFINISHED = tuple(f"{parent}{prefix}" for parent in ("", "checkpoints/") for prefix in (".writing-", ".replaced-"))
_PROBE = ".rl_vlm_probe"
EXISTS = "The run folder {} exists: choose another --run-dir, or add --resume or --overwrite."
_EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "az": "azure"}  # protocol -> extra of this package


class RemoteStorageError(RLVLMError):
    """The remote storage could not be read or written.

    Do: see that the address and its credentials are right, then `--resume`.
    """


def is_remote(run_dir: RunDir) -> bool:
    return "://" in str(run_dir)


class RemoteFolder:
    """A run folder at a URL and its copy on this machine. Raises UserInputError."""

    def __init__(self, url: str, folder: Path) -> None:
        import fsspec

        self.url, self.folder = url.rstrip("/"), folder
        protocol = url.partition("://")[0]
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            how = f"pip install 'rl-vlm[{extra}]'" if extra else "install the package that it names"
            raise UserInputError(f"Run folders at {protocol}:// need another package ({error}): {how}.") from error
        except ValueError as error:
            raise UserInputError(
                f"{url} cannot be opened ({error}): give a folder, or a URL such as s3://BUCKET/RUN."
            ) from error
        self._copied: dict[str, tuple[int, int]] = {}  # name -> size and time of change, as they were uploaded
        self._index: frozenset[str] = frozenset()  # what the index there names

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Fetch the run at the URL (`resume`), delete it (`overwrite`), or reject it. Raises UserInputError,
        RemoteStorageError."""
        with self._errors("opened"):
            # A bucket that is not there is found now, not when the run is over.
            self._files.pipe_file(f"{self._root}/{_PROBE}", b"rl-vlm wrote this to see whether it may.\n")
            self._delete([_PROBE])
            self._files.invalidate_cache()
            index = self._read_index()
            if index is None:
                # After a first copy that never came to its end the run begins anew, and its files are written again.
                begins_anew = (resume or overwrite) and self._files.exists(f"{self._root}/{RUN_MARKER}")
                if not begins_anew and self._files.exists(self._root) and self._files.find(self._root):
                    raise UserInputError(
                        f"{self.url} holds files and no run, and nothing in it is deleted: choose another --run-dir."
                    )
            elif resume:
                for name in sorted(index):
                    path = self.folder / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(f"{self._root}/{name}", str(path))
                    self._copied[name] = _state(path)
                self._index = index
            elif overwrite:
                self._delete([_INDEX, *index])
            else:
                raise UserInputError(EXISTS.format(self.url))

    def push(self) -> None:
        """Upload what has changed, then the index; then delete what is gone here. Raises RemoteStorageError."""
        with self._errors("written"):
            for _ in range(_LISTINGS):
                names = self._names()
                if RUN_MARKER not in names:  # nothing there is deleted for it
                    raise RemoteStorageError(f"{self.url} was left as it was: its copy {self.folder} is gone.")
                for name in sorted(names, key=lambda name: (name != RUN_MARKER, name)):  # marker first: see `prepare`
                    self._upload(name)
                # A checkpoint that was replaced meanwhile is in neither listing whole.
                if names <= self._copied.keys() and names == self._names():
                    break
            else:
                raise RemoteStorageError(f"{self.url} was not written: files changed while they were copied.")
            if names != self._index:
                self._files.pipe_file(f"{self._root}/{_INDEX}", json.dumps({"files": sorted(names)}, indent=1).encode())
                gone, self._index = self._index - names, names
                self._delete(sorted(gone))

    def _names(self) -> frozenset[str]:
        names = (name for name in run_files(self.folder) if not name.startswith(_UNFINISHED))
        return frozenset(name for name in names if not name.endswith(".tmp"))

    def _upload(self, name: str) -> None:
        path = self.folder / name
        try:
            state = _state(path)
            if self._copied.get(name) != state:
                self._files.put_file(str(path), f"{self._root}/{name}")
                self._copied[name] = state
        except FileNotFoundError:  # it was deleted meanwhile, or the storage lacks something, such as the bucket
            self._copied.pop(name, None)
            if path.exists():
                raise

    def _read_index(self) -> frozenset[str] | None:
        try:
            names = frozenset(json.loads(self._files.cat_file(f"{self._root}/{_INDEX}"))["files"])
            inside = not any(PurePath(name).is_absolute() or ".." in PurePath(name).parts for name in names)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            names, inside = frozenset(), False
        if not inside or RUN_MARKER not in names:
            raise UserInputError(f"{self.url}/{_INDEX} is not a run's: choose another --run-dir.")
        return names

    def _delete(self, names: list[str]) -> None:
        for name in names:
            if self._files.exists(f"{self._root}/{name}"):
                self._files.rm_file(f"{self._root}/{name}")

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except RLVLMError:
            raise
        except Exception as error:  # each storage's client raises its own
            raise RemoteStorageError(f"{self.url} could not be {what}: {one_line(error, 300)}") from error


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@contextmanager
def remote_run_folder(url: str, *, resume: bool, overwrite: bool) -> Iterator[Path]:
    """A folder of this machine that is copied to `url`, and deleted unless the last copy failed. Raises UserInputError,
    RemoteStorageError."""
    parent = cache_folder() / "runs"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    try:
        remote = RemoteFolder(url, folder)
        remote.prepare(resume=resume, overwrite=overwrite)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    stop = threading.Event()

    def push_now_and_then() -> None:
        while not stop.wait(PUSH_EVERY_S):
            try:
                remote.push()
            except RemoteStorageError as error:  # the next copy has it all
                logger.warning("%s", error)

    background = threading.Thread(target=push_now_and_then, name="remote run folder", daemon=True)
    background.start()
    try:
        yield folder
    finally:
        stop.set()
        print(f"Copying the run to {url} ...", file=sys.stderr, flush=True)
        try:
            background.join()
            retried(remote.push, (RemoteStorageError,), _LAST_COPY_S)
        except (RemoteStorageError, KeyboardInterrupt) as error:
            why = str(error) or f"The last copy to {url} was interrupted."
            raise RemoteStorageError(f"{why} The run folder is {folder} on this machine: copy it yourself.") from error
        shutil.rmtree(folder, ignore_errors=True)
