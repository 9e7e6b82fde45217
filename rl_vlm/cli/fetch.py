"""Downloads models and data sets from the Hugging Face hub, so that runs work offline."""

from __future__ import annotations

import os
from pathlib import Path

from rl_vlm.types import RLVLMError, UserInputError

# Weights in other formats than safetensors are never read.
_IGNORED = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", "*.gguf", "original/*"]


class FetchError(RLVLMError):
    """The hub could not be reached, or the download broke off."""


def fetch(name: str, data: bool = False) -> Path:
    """Download a model, or a data set with `data`, into the hub's cache; return its folder there.

    What is there already is not downloaded again. `tiny` builds the built-in model. Raises UserInputError for a name
    that is wrong or locked, FetchError when the hub cannot be reached.
    """
    if name == "tiny" and not data:
        from rl_vlm.models.tiny.model import tiny_model_path

        return tiny_model_path()
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise UserInputError(f"{name!r} is not a name of the hub: give owner/name, such as Qwen/Qwen3-VL-2B-Instruct.")
    import httpx
    from huggingface_hub import errors, snapshot_download

    kind = "data set" if data else "model"
    try:
        folder = snapshot_download(
            name, repo_type="dataset" if data else "model", ignore_patterns=None if data else _IGNORED
        )
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
        raise FetchError(f"The hub cannot be reached to fetch {name}: check the network and HF_ENDPOINT.") from error
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FetchError(
            f"Fetching {name} broke off ({reason}): run the command again, it goes on where it stopped."
        ) from error
    if data:
        _prepare(name)
    elif not (Path(folder) / "config.json").is_file():
        raise UserInputError(
            f"{name} holds no config.json, so it is no model that can be loaded. Is it a data set? Add --data."
        )
    return Path(folder)


def _prepare(name: str) -> None:
    """Convert the data set once: offline, `datasets` finds a data set by its name only if it was converted before."""
    import datasets

    try:
        datasets.load_dataset(name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FetchError(f"The data set {name} was fetched and cannot be opened ({reason}).") from error


def _page(name: str, data: bool) -> str:
    return f"https://huggingface.co/{'datasets/' if data else ''}{name}"
