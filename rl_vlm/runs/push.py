"""Puts what a run trained on the Hugging Face hub, with a card that says what it is."""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError

from rl_vlm.config import PolicyConfig, PreferenceConfig, load_config
from rl_vlm.config.loading import of_policy
from rl_vlm.labelling.building import prompts_of
from rl_vlm.models.export import export_model, find_trained_and_model
from rl_vlm.models.hub import transport_errors
from rl_vlm.models.trained import is_full
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.runs.api import Run
from rl_vlm.runs.reward_model import RewardModel
from rl_vlm.safe_text import one_line
from rl_vlm.types import RLVLMError, UserInputError

_TEMPLATE = Path(__file__).with_name("card.md")
_PACKAGES = ("rl-vlm", "torch", "transformers", "peft", "ray", "vllm")


class HubError(RLVLMError):
    """The hub did not take the upload.

    Do: log in with `hf auth login`, and try again.
    """


def push(run: str | Path, repo: str, *, merge: bool = False, public: bool = False) -> str:
    """Upload the adapter of a run to `owner/name` on the hub, with `merge` (and after full fine-tuning) the whole
    model, or the reward model of a preference run; returns the address.

    The token is that of `hf auth login` or HF_TOKEN. Raises UserInputError and HubError.
    """
    folder = Path(run).expanduser()
    config = load_config(folder / "config.yaml")
    with tempfile.TemporaryDirectory(prefix="rl-vlm-push-") as scratch:
        draft = Path(scratch) / "model"
        if isinstance(config, PreferenceConfig):
            draft.mkdir()
            RewardModel.load(folder).save(draft)
            text = _reward_card(folder, config, repo)
        else:
            text = _draft_policy(folder, draft, of_policy(config), repo, merge)
        if (curve := folder / "curve.png").is_file():
            shutil.copy(curve, draft)
        (draft / "README.md").write_text(text, encoding="utf-8")
        api = HfApi()
        try:
            api.create_repo(repo, private=not public, exist_ok=True)
            commit = api.upload_folder(repo_id=repo, folder_path=draft, commit_message=f"Run {config.name} of rl_vlm")
        except HFValidationError as error:
            raise UserInputError(f"{repo!r} is no name on the hub: give owner/name.") from error
        except transport_errors() as error:
            raise HubError(
                f"The hub did not take {repo} ({one_line(error)}): log in with `hf auth login`, or set HF_TOKEN to a "
                "token that may write."
            ) from error
    return str(commit.repo_url)


def _draft_policy(folder: Path, draft: Path, config: PolicyConfig, repo: str, merge: bool) -> str:
    """Write what a policy run uploads, and return its card."""
    trained, _ = find_trained_and_model(folder)
    if merge := merge or is_full(trained):
        export_model(folder, draft)
    else:
        shutil.copytree(trained, draft)
        _name_base(draft / AdapterPayload.CONFIG, config.model.path)
    return _policy_card(folder, config, repo, merge)


def _name_base(file: Path, model: str) -> None:
    """Name the base model as the configuration does: peft writes a path of this machine."""
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "base_model_name_or_path": model}, indent=2) + "\n")


def _card(folder: Path, config: PolicyConfig | PreferenceConfig, repo: str, head: ModelCardData, **content: Any) -> str:
    """The card: `head` for the hub's search, and `card.md` with the content of this kind of model."""
    found = {package: _version(package) for package in _PACKAGES}
    versions = ", ".join(f"{package} {version}" for package, version in found.items() if version)
    content["facts"] |= {"seed": config.seed, "versions": versions}
    curve, name = (folder / "curve.png").is_file(), repo.split("/")[-1]
    return str(ModelCard.from_template(head, str(_TEMPLATE), repo=repo, name=name, curve=curve, **content))


def _policy_card(folder: Path, config: PolicyConfig, repo: str, merged: bool) -> str:
    """The card of a policy: base, task, algorithm, held-out results, versions, and how to load it."""
    base, named = config.model.path, not Path(config.model.path).is_absolute()
    head = ModelCardData(
        library_name="transformers" if merged else "peft",
        pipeline_tag="image-text-to-text",
        tags=["rl_vlm", "reinforcement-learning", config.algorithm.name],
        base_model=base if named and "/" in base else None,
    )
    facts = {
        "iterations": config.algorithm.iterations,
        "groups × samples": f"{config.rollout.prompts_per_iteration} × {config.rollout.group_size}",
        "learning rate": f"{config.learner.lr:g}",
        "weights": "all" if config.model.train == "full" else f"LoRA, rank {config.model.lora.rank}",
    }
    return _card(
        folder, config, repo, head, kind="model" if merged else "adapter", facts=facts, results=_results(folder),
        base=base, of=base if named else Path(base).name, algorithm=config.algorithm.name.upper(),
        task=config.env.title,
    )  # fmt: skip


def _reward_card(folder: Path, config: PreferenceConfig, repo: str) -> str:
    """The card of a reward model: task, labels, accuracy, versions, and how to load it."""
    preference, progress = config.preference, Run(folder).progress
    model = preference.reward_model
    facts = {
        "goal": prompts_of(preference.labels, config.env.id).goal,
        "labels": f"{preference.labels.source}, {preference.max_feedback} at most",
        "model": f"{model.size} × {model.architecture}, pictures of {preference.image_size} × {preference.image_size}",
    }
    for name, column in (("accuracy on its labels", "reward_model/accuracy"), ("labels that agree", "labels/accuracy")):
        if column in progress and len(values := progress[column].dropna()):
            facts[name] = f"{values.iloc[-1]:.3f}"
    head = ModelCardData(library_name="rl_vlm", tags=["rl_vlm", "reward-model", "preferences"])
    return _card(folder, config, repo, head, kind="reward", facts=facts, task=config.env.id)


def _results(folder: Path) -> list[list[str]]:
    """A row per variant: accuracy on the held-out split with its interval of 95 %, before and after."""
    rows = Run(folder).evaluations.to_dict("records")
    if not rows:
        return []

    def accuracy(row: dict[str, Any], name: str) -> str:
        return f"{row[f'accuracy/{name}']:.3f} [{row[f'accuracy_low/{name}']:.3f}, {row[f'accuracy_high/{name}']:.3f}]"

    names = [key.removeprefix("accuracy/") for key in rows[-1] if key.startswith("accuracy/")]
    return [
        [name, accuracy(rows[0], name), accuracy(rows[-1], name), str(rows[-1].get(f"items/{name}", ""))]
        for name in names
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
