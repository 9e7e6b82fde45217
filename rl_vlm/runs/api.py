"""`rl_vlm.train` and `rl_vlm.load_run`: a run from Python."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pyarrow.parquet as pq
from PIL import Image

from rl_vlm.config import CommonConfig, RewardFunction, TrainConfig, apply_overrides, parse_config
from rl_vlm.config.loading import read_yaml
from rl_vlm.config.recipes import find_config
from rl_vlm.config.yaml_text import load_yaml
from rl_vlm.envs.loading import load_object
from rl_vlm.files import did_you_mean
from rl_vlm.monitoring.callbacks import Callback
from rl_vlm.runs import train as training
from rl_vlm.runs.remote_folder import RunDir, is_remote
from rl_vlm.types import UserInputError

DATA_ENV = "QA-v0"
Reward = Callable[..., Any] | str | Mapping[str, Any]  # a function, what names one, or a part of `env.reward.functions`


@dataclass(frozen=True, slots=True)
class Run:
    """The folder of a run, here or at a URL. Its files are read when they are asked for, so a run that goes on can be
    followed. docs/results.md lists keys and columns."""

    folder: RunDir  # a path, or the text of a URL

    def __post_init__(self) -> None:
        if isinstance(self.folder, str) and "://" not in self.folder:
            object.__setattr__(self, "folder", Path(self.folder))

    @property
    def config(self) -> dict[str, Any]:
        """`config.yaml`: the run's settings."""
        content: dict[str, Any] = load_yaml(self.read("config.yaml").decode()) or {}
        return content

    @property
    def metrics(self) -> dict[str, Any]:
        """`result.json`: how the run ended; empty while it goes on."""
        result: dict[str, Any] = json.loads(self.read("result.json") or b"{}")
        return result

    @property
    def progress(self) -> pd.DataFrame:
        """A row of metrics per iteration."""
        text = self.read("progress.csv")
        return pd.read_csv(io.BytesIO(text)) if text else pd.DataFrame()

    @property
    def evaluations(self) -> pd.DataFrame:
        """A row per evaluation."""
        return pd.json_normalize(self.lines("eval.jsonl"), max_level=0)

    @property
    def trajectories(self) -> pd.DataFrame:
        """A row per sampled episode. `info` and `messages` are parsed."""
        return self._dumps(slice(None))

    @property
    def newest_trajectories(self) -> pd.DataFrame:
        """As `trajectories`, of the newest dump alone."""
        return self._dumps(slice(-1, None))

    def _dumps(self, wanted: slice) -> pd.DataFrame:
        files, root = self._opened()
        found = sorted(files.glob(f"{root}/trajectories/*.parquet"))[wanted]
        tables = [pd.read_parquet(file, filesystem=files) for file in found]
        if not tables:
            return pd.DataFrame()
        rows = pd.concat(tables, ignore_index=True)
        return rows.assign(**{name: rows[name].map(json.loads) for name in ("info", "messages")})

    def image(self, sha256: str) -> Image.Image:
        """An image that a row of `trajectories` names. Raises UserInputError if the run kept no such image."""
        if not (png := self.read(f"trajectories/images/{sha256}.png")):
            raise UserInputError(f"{self.folder} holds no image {sha256}: take a name from the column `images`.")
        return Image.open(io.BytesIO(png), formats=("PNG",))

    def _opened(self) -> tuple[Any, str]:
        files, root = fsspec.core.url_to_fs(str(self.folder))
        return files, str(root)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a file of JSON lines; the last one may be half written."""
        lines, _, _ = self.read(name).rpartition(b"\n")
        return [json.loads(line) for line in lines.splitlines()]

    def files(self, folder: str = "") -> dict[str, str]:
        """The files of a folder of the run, by their place in it, each with what changes when the file does."""
        files, root = self._opened()
        place = f"{root}/{folder}".rstrip("/")
        try:
            found = files.ls(place, detail=True, refresh=True)  # listings of object stores are kept otherwise
        except OSError:
            return {}
        return {
            "/".join(filter(None, (folder, str(one["name"]).rsplit("/", 1)[-1]))): _stamp(one)
            for one in found
            if one["type"] == "file"
        }

    def parquet(self, name: str) -> pq.ParquetFile:
        """A file of the run, of which what is asked for is read. Raises FileNotFoundError."""
        files, root = self._opened()
        return pq.ParquetFile(f"{root}/{name}", filesystem=files)

    def read(self, name: str) -> bytes:
        """A file of the run; empty where it is missing."""
        files, root = self._opened()
        try:
            content: bytes = files.cat_file(f"{root}/{name}")
        except FileNotFoundError:
            return b""
        return content


def _stamp(file: Mapping[str, Any]) -> str:
    """When a file was changed, in seconds since 1970 (0: not known), and what else changes with its content."""
    changed = file.get("mtime", file.get("LastModified", file.get("updated", 0.0)))
    seconds = changed.timestamp() if hasattr(changed, "timestamp") else float(changed)
    return f"{seconds:.6f}-{file.get('size')}-{file.get('ETag', '')}"


def load_run(folder: RunDir) -> Run:
    """The results of a run that has ended or goes on. Raises UserInputError if the folder is none of a run."""
    run = Run(folder)
    if not is_remote(folder) and not Path(folder).exists():
        raise UserInputError(f"There is no folder {folder}.{did_you_mean(Path(folder), '*/')}")
    if not run.read("config.yaml"):
        raise UserInputError(f"{folder} is not the folder of a run: it holds no config.yaml, or an empty one.")
    return run


def train(
    config: str | Path | Mapping[str, Any] | TrainConfig,
    *,
    dataset: str | Path | Mapping[str, str] | None = None,
    reward: Reward | list[Reward] | None = None,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    run_dir: RunDir | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Run:
    """Train to the end, as `rl-vlm train` does.

    config: a YAML file, a recipe's name, the content of a file, or a configuration. dataset: data of your own, which
    QA-v0 asks in place of the configuration's environment. reward: functions with TRL's signature in place of the
    configuration's reward. overrides: dotted keys and their values, which win over all else. callbacks: your own code
    after iterations and evaluations.

    Raises UserInputError before anything starts, later InterruptedRun and RLVLMError.
    """
    run = configured(config, dataset, reward, overrides)
    folder = run_dir or Path("runs") / run.name
    training.train(run, folder, resume=resume, overwrite=overwrite, callbacks=callbacks)
    return Run(folder)


def configured(
    config: str | Path | Mapping[str, Any] | TrainConfig,
    dataset: str | Path | Mapping[str, str] | None = None,
    reward: Reward | list[Reward] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """The configuration that arguments of `train` make. Raises UserInputError."""
    if isinstance(config, CommonConfig):
        config = config.model_dump(exclude_unset=True)
    data = dict(config) if isinstance(config, Mapping) else read_yaml(find_config(config), ())
    env: dict[str, Any] = dict(data.get("env") or {})
    if dataset is not None:
        if not isinstance(dataset, str | Path | Mapping):
            raise UserInputError(
                f"dataset must be a path, a hub name, or one for each split, not a {type(dataset).__name__}: write it "
                "to a file, as datasets.Dataset.to_parquet does."
            )
        sources = dict(dataset) if isinstance(dataset, Mapping) else str(dataset)
        env = {**(env if env.get("id") == DATA_ENV else {}), "id": DATA_ENV, "data": sources}
    if reward is not None:
        env["reward"] = [_named(one) for one in (reward if isinstance(reward, list) else [reward])]
    return parse_config(apply_overrides({**data, "env": env}, overrides or {}))


def _named(reward: Reward) -> Any:
    """A function by the name under which other processes import it, or as the object itself, as those of notebooks,
    scripts and other functions are."""
    if not callable(reward):
        return reward
    module, name = getattr(reward, "__module__", ""), getattr(reward, "__qualname__", ".")
    if module != "__main__" and "." not in name and load_object(f"{module}:{name}") is reward:
        return RewardFunction(function=f"{module}:{name}")
    return RewardFunction.of(reward, getattr(reward, "__name__", type(reward).__name__))
