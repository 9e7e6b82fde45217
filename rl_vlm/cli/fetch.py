"""Downloads models and data sets from the Hugging Face hub, so that runs work offline."""

from __future__ import annotations

from pathlib import Path

from rl_vlm.models.builtin import builtin_models
from rl_vlm.models.hub import FetchError, fetch_model, hub_errors
from rl_vlm.types import UserInputError


def fetch(name: str, data: bool = False, max_rows: int | None = None) -> Path:
    """Download a model, or a data set with `data`, into the hub's cache; return its folder there.

    What is there already is not downloaded again. `tiny` builds the built-in model. With `data` a short name of `known_data.py`
    gives a folder for `env.data`, with at most `max_rows` of each split. Raises UserInputError for a name that is wrong or
    locked, FetchError when the hub cannot be reached.
    """
    if name in builtin_models() and not data:
        return builtin_models()[name].folder()
    if data and "/" not in name:
        return _fetch_known(name, max_rows)
    if max_rows is not None:
        raise UserInputError("--max-rows is for the data sets with short names, which `rl-vlm fetch --help` lists.")
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise UserInputError(f"{name!r} is not a name of the hub: give owner/name, such as Qwen/Qwen3-VL-2B-Instruct.")
    if not data:
        return fetch_model(name)
    from huggingface_hub import snapshot_download

    with hub_errors(name, data=True):
        folder = snapshot_download(name, repo_type="dataset")
    _prepare(name)
    return Path(folder)


def _fetch_known(name: str, max_rows: int | None) -> Path:
    from rl_vlm.cli.known_data import KNOWN, fetch_known

    if name not in KNOWN:
        raise UserInputError(
            f"There is no data set {name!r}: give one of {', '.join(KNOWN)}, or owner/name of the hub such as hiyouga/geometry3k."
        )
    with hub_errors(KNOWN[name].repo, data=True):
        return fetch_known(name, max_rows)


def _prepare(name: str) -> None:
    """Convert the data set once: offline, `datasets` finds a data set by its name only if it was converted before."""
    import datasets

    try:
        datasets.load_dataset(name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FetchError(f"The data set {name} was fetched and cannot be opened ({reason}).") from error
