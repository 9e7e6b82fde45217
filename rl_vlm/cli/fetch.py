"""Downloads models and data sets from the Hugging Face hub, so that runs work offline."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from rl_vlm.types import RLVLMError, UserInputError

# Weights in other formats than safetensors are never read.
_IGNORED = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", "*.gguf", "original/*"]

_NOT_CONNECTED = ("ConnectError", "ConnectTimeout", "ConnectionError")


class FetchError(RLVLMError):
    """The hub could not be reached, or the download broke off."""


def fetch(name: str, data: bool = False, max_rows: int | None = None) -> Path:
    """Download a model, or a data set with `data`, into the hub's cache; return its folder there.

    What is there already is not downloaded again. `tiny` builds the built-in model. With `data` a short name of `known_data.py`
    gives a folder for `env.data`, with at most `max_rows` of each split. Raises UserInputError for a name that is wrong or
    locked, FetchError when the hub cannot be reached.
    """
    if name == "tiny" and not data:
        from rl_vlm.models.tiny.model import tiny_model_path

        return tiny_model_path()
    if data and "/" not in name:
        return _fetch_known(name, max_rows)
    if max_rows is not None:
        raise UserInputError("--max-rows is for the data sets with short names, which `rl-vlm fetch --help` lists.")
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise UserInputError(f"{name!r} is not a name of the hub: give owner/name, such as Qwen/Qwen3-VL-2B-Instruct.")
    from huggingface_hub import snapshot_download

    with _hub_errors(name, data):
        folder = snapshot_download(
            name, repo_type="dataset" if data else "model", ignore_patterns=None if data else _IGNORED
        )
    if data:
        _prepare(name)
    elif not (Path(folder) / "config.json").is_file():
        raise UserInputError(
            f"{name} holds no config.json, so it is no model that can be loaded. Is it a data set? Add --data."
        )
    return Path(folder)


def _fetch_known(name: str, max_rows: int | None) -> Path:
    from rl_vlm.cli.known_data import KNOWN, fetch_known

    if name not in KNOWN:
        raise UserInputError(
            f"There is no data set {name!r}: give one of {', '.join(KNOWN)}, or owner/name of the hub such as hiyouga/geometry3k."
        )
    with _hub_errors(KNOWN[name].repo, data=True):
        return fetch_known(name, max_rows)


@contextlib.contextmanager
def _hub_errors(name: str, data: bool) -> Iterator[None]:
    """Whatever the hub's client raises as one sentence."""
    from huggingface_hub import errors

    kind = "data set" if data else "model"
    # The client's transport is another package from version to version; the base of its errors is one of the client's own error.
    transport = cast("tuple[type[Exception], ...]", errors.HfHubHTTPError.__bases__)
    broken: tuple[type[Exception], ...] = (*transport, zipfile.BadZipFile)
    try:
        yield
    except errors.GatedRepoError as error:
        raise UserInputError(
            f"The {kind} {name} has a licence: accept it at {_page(name, data)}, then set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        other = " Is it a model? Then leave out --data." if data else " Is it a data set? Then add --data."
        raise UserInputError(
            f"The hub has no {kind} {name}, or it is private and HF_TOKEN is not set.{other}"
        ) from error
    except errors.HFValidationError as error:
        raise UserInputError(f"{name!r} is not a name of the hub ({error}).") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
            raise UserInputError(
                f"The {kind} {name} is not on this machine and HF_HUB_OFFLINE is set: unset it once."
            ) from error
        raise FetchError(_unreachable(name)) from error
    except broken as error:
        if type(error).__name__ in _NOT_CONNECTED:
            raise FetchError(_unreachable(name)) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FetchError(
            f"Fetching {name} broke off ({reason}): run the command again, it goes on where it stopped."
        ) from error


def _prepare(name: str) -> None:
    """Convert the data set once: offline, `datasets` finds a data set by its name only if it was converted before."""
    import datasets

    try:
        datasets.load_dataset(name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FetchError(f"The data set {name} was fetched and cannot be opened ({reason}).") from error


def _unreachable(name: str) -> str:
    return f"The hub cannot be reached to fetch {name}: check the network and HF_ENDPOINT."


def _page(name: str, data: bool) -> str:
    return f"https://huggingface.co/{'datasets/' if data else ''}{name}"
