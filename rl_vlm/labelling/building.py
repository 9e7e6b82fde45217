"""Labellers by configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_vlm.asking import Client, Endpoint, ServedEndpoint
from rl_vlm.asking.http import HTTPEndpoint
from rl_vlm.config import LabelsSection
from rl_vlm.labelling.labeller import VLMLabeller
from rl_vlm.labelling.labels import Labeller
from rl_vlm.labelling.prompts import task_prompts
from rl_vlm.labelling.similarity import Similarity
from rl_vlm.labelling.teachers import ScriptedTeacher
from rl_vlm.labelling.templates import TaskPrompts
from rl_vlm.types import UserInputError

if TYPE_CHECKING:
    from rl_vlm.models.images import TextSide

_FAMILIES = {"clip": ("clip",), "itm": ("blip-2", "blip_2")}  # model types that each source can run


def prompts_of(section: LabelsSection, env_id: str = "") -> TaskPrompts:
    """The prompts that a configuration asks for; `env_id` names the task where the section does not."""
    # A goal is enough for an environment without prompts.
    prompts = task_prompts(section.task or env_id, section.prompts, goal="" if section.task else section.goal or "")
    changes = {"description": section.description or prompts.description}
    if section.goal and section.goal != prompts.goal:
        changes = {"goal": section.goal, "description": section.description or ""}  # the known one is of another goal
    return prompts.model_copy(update=changes)


def build_labeller(
    section: LabelsSection,
    env_id: str = "",
    seed: int = 0,
    client: Client | None = None,
    text: TextSide | None = None,
    device: str = "cpu",
) -> Labeller:
    """The labeller that a configuration names. `client` and `text` are those of the served model, for `source: vlm`;
    `device` is for clip and itm. Raises UserInputError."""
    if section.source == "scripted":
        return ScriptedTeacher(section.teacher, seed)
    if section.source in ("clip", "itm"):
        return build_similarity(section, env_id, device)
    endpoint: Endpoint
    if section.source in ("endpoint", "generate"):
        endpoint = HTTPEndpoint(section.endpoint, plain=section.source == "generate")
    elif client is None or text is None:
        raise UserInputError("Labels of the served model need a served model: start one, or choose another source.")
    else:
        endpoint = ServedEndpoint(client, text)
    return VLMLabeller(endpoint, prompts_of(section, env_id), section, seed)


def build_similarity(section: LabelsSection, env_id: str = "", device: str = "cpu") -> Similarity:
    """Similarity of pictures and the description of the achieved goal, for labels or as a reward itself."""
    families = _FAMILIES[section.source]
    return Similarity(
        families, section.similarity_model, prompts_of(section, env_id).description, device, section.frames
    )
