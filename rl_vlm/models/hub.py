"""Downloads of models from the Hugging Face hub, with one sentence for what goes wrong."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from rl_vlm.safe_text import one_line
from rl_vlm.types import RLVLMError, UserInputError

# Weights in other formats than safetensors are never read.
_IGNORED = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", "*.gguf", "original/*"]

_REACH_S = 10.0
_NOT_CONNECTED = ("ConnectError", "ConnectTimeout", "ConnectionError")


class FetchError(RLVLMError):
    """The hub could not be reached, or the download broke off.

    Do: try again while online, or copy the model's folder here.
    """


def fetch_model(name: str) -> Path:
    """Download what is missing of a model into the hub's cache; returns its folder there.

    Raises UserInputError for a name that is wrong or locked, FetchError where the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    with hub_errors(name):
        folder = Path(snapshot_download(name, repo_type="model", ignore_patterns=_IGNORED))
    if not (folder / "config.json").is_file():
        raise UserInputError(
            f"{name} holds no config.json, so it is no model that can be loaded. Is it a data set? Add --data."
        )
    return folder


def fetch_config(name: str) -> Path:
    """Download a model's config.json alone; returns its folder. Raises as `fetch_model` does."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import get_session

    with hub_errors(name):
        if not constants.HF_HUB_OFFLINE:  # once: the client tries five times, with a line for each
            get_session().head(constants.ENDPOINT, timeout=_REACH_S)
        return Path(hf_hub_download(name, "config.json")).parent


def transport_errors() -> tuple[type[Exception], ...]:
    """What the hub's client raises for its transport, which differs from version to version, and for a reply's status:
    the former is a base of the latter."""
    from huggingface_hub.errors import HfHubHTTPError

    return cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)


@contextlib.contextmanager
def hub_errors(name: str, data: bool = False) -> Iterator[None]:
    """Whatever the hub's client raises as one sentence."""
    from huggingface_hub import errors

    kind, path = ("data set", f"datasets/{name}") if data else ("model", name)
    unreachable = f"The hub cannot be reached to fetch {name}: check the network and HF_ENDPOINT."
    broken: tuple[type[Exception], ...] = (*transport_errors(), zipfile.BadZipFile)
    try:
        yield
    except errors.GatedRepoError as error:
        raise UserInputError(
            f"The {kind} {name} has a licence: accept it at https://huggingface.co/{path}, then set HF_TOKEN."
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
        raise FetchError(unreachable) from error
    except broken as error:
        if type(error).__name__ in _NOT_CONNECTED:
            raise FetchError(unreachable) from error
        raise FetchError(
            f"Fetching {name} broke off ({one_line(error)}): run the command again, it goes on where it stopped."
        ) from error
