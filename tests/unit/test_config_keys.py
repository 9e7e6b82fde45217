"""Every key of the configuration is read by some code, and a key that a run ignores cannot be set.

What reads a key is found in the syntax trees of the package: `run.learner.lr` where `run` is known to be a `PolicyConfig`. Types
come from annotations, from assignments, and from names of attributes that are one section wherever their type is known.
Limits: it finds code that mentions a key, not code that does the right thing with it, and code that nothing calls counts.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import rl_vlm
from rl_vlm import config as sections
from rl_vlm.config import (
    PolicyConfig,
    PreferenceConfig,
    Section,
    SFTConfig,
    apply_overrides,
    load_config,
    load_sft_config,
    parse_config,
    save_config,
)
from rl_vlm.config.loading import _COUNTERPARTS, _KINDS
from rl_vlm.config.section import keys_of, section_of
from rl_vlm.types import UserInputError

PACKAGE = Path(rl_vlm.__file__).parent
CLASSES: dict[str, set[type[Section]]] = {
    name: {one for one in (get_args(kind) or (kind,)) if isinstance(one, type) and issubclass(one, Section)}
    for name, kind in vars(sections).items()
    if not name.startswith("_")
}
# Methods of a section that read all of its keys.
_WHOLE = {"model_dump", "model_dump_json"}
_READ_AS_DATA = {"algorithm.preset"}  # before there is a section, see AlgorithmSection._with_preset

Kind = type[Section]
Read = tuple[str, str]  # the section's class, the key


class Reader(ast.NodeVisitor):
    """Collects which attributes of sections a file reads. `attributes` maps names of attributes to the sections seen there."""

    def __init__(self, attributes: dict[str, set[Kind]], inside: bool) -> None:
        self._attributes = attributes
        self._inside = inside  # the configuration package itself
        self._scopes: list[dict[str, set[Kind]]] = [{}]
        self._owner: list[str] = []
        self.reads: dict[str, set[Read]] = defaultdict(set)  # by the section's method that reads, "" for other code

    # --- types

    def _annotated(self, node: ast.AST | None) -> set[Kind]:
        names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)] if node else []
        return {kind for name in names for kind in CLASSES.get(name, ())}

    def _kinds(self, node: ast.AST) -> set[Kind]:
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self._scopes) if node.id in scope), set())
        if isinstance(node, ast.Attribute):
            fields = [
                kind.model_fields[node.attr] for kind in self._kinds(node.value) if node.attr in kind.model_fields
            ]
            if fields:
                return {inner for field in fields if (inner := section_of(field.annotation))}
            return self._attributes.get(node.attr, set())
        if isinstance(node, ast.BoolOp | ast.IfExp):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return set().union(*map(self._kinds, parts))
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                return CLASSES[node.func.id]
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("model_copy", "items", "values"):
                return self._kinds(node.func.value)
            if isinstance(node.func, ast.Name) and node.func.id == "enumerate":
                return self._kinds(node.args[0])
        if isinstance(node, ast.Subscript):  # an element of several
            return self._kinds(node.value)
        return set()

    def _bind(self, target: ast.AST, kinds: set[Kind]) -> None:
        if isinstance(target, ast.Name):
            if kinds:
                self._scopes[-1][target.id] = kinds
            else:
                self._scopes[-1].pop(target.id, None)
        elif isinstance(target, ast.Attribute):
            self._attributes[target.attr] |= kinds

    def _bind_element(self, target: ast.AST, several: ast.AST) -> None:
        """Of `for place, one in enumerate(several)` and the like the last name is the element."""
        self._bind(target.elts[-1] if isinstance(target, ast.Tuple) else target, self._kinds(several))

    # --- statements

    def visit_For(self, node: ast.For) -> None:
        self._bind_element(node.target, node.iter)
        self.generic_visit(node)

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for generator in node.generators:  # which come after the element that they bind
            self._bind_element(generator.target, generator.iter)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._owner.append(node.name)
        self.generic_visit(node)
        self._owner.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        decorators = {ast.unparse(one).split("(")[0] for one in node.decorator_list}
        if self._inside and decorators & {"field_validator", "model_serializer"}:
            return  # checking a key is not reading it
        if "property" in decorators:
            self._attributes[node.name] |= self._annotated(node.returns)
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        scope = {arg.arg: kinds for arg in arguments if (kinds := self._annotated(arg.annotation))}
        owner = self._owner[-1] if self._owner else ""
        if self._inside and owner in CLASSES:
            scope["self"] = CLASSES[owner]
        self._scopes.append(scope)
        self._owner.append(f"{owner}.{node.name}" if self._inside and owner in CLASSES else owner)
        self.generic_visit(node)
        self._owner.pop()
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    self._bind(one, self._kinds(value))
            else:
                self._bind(target, self._kinds(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if not (self._inside and self._owner and self._owner[-1] in CLASSES):  # a section's own field
            self._bind(node.target, self._annotated(node.annotation))
            if isinstance(node.target, ast.Name) and self._owner:
                self._attributes[node.target.id] |= self._annotated(node.annotation)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return
        method = self._owner[-1] if self._owner and "." in self._owner[-1] else ""
        for kind in self._kinds(node.value):
            keys = list(kind.model_fields) if node.attr in _WHOLE else [node.attr]
            # What is read of a section is read of those that derive from it; a method may be that of a base.
            known = {one for several in CLASSES.values() for one in several}
            kinds = {kind} | {one for one in known if issubclass(one, kind) or issubclass(kind, one)}
            self.reads[method] |= {(one.__name__, key) for one in kinds for key in keys}


@functools.cache
def sources() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def reads_of(texts: Mapping[Path, str]) -> set[Read]:
    """All (section, key) that code reads. What a section's own method reads counts if the method is used."""
    files = [(ast.parse(text), path.parent.name == "config") for path, text in texts.items()]
    attributes: dict[str, set[Kind]] = defaultdict(set)
    while True:  # until no attribute's type is new
        known = sum(map(len, attributes.values()))
        found: dict[str, set[Read]] = defaultdict(set)
        for tree, inside in files:
            reader = Reader(attributes, inside)
            reader.visit(tree)
            for method, reads in reader.reads.items():
                found[method] |= reads
        if sum(map(len, attributes.values())) == known:
            break
    used = found.pop("")
    while True:
        more = {read for method, reads in found.items() if tuple(method.split(".")[:2]) in used for read in reads}
        if more <= used:
            return used
        used |= more


def section_and_key(key: str, root: Kind = PolicyConfig) -> Read:
    *parents, name = key.split(".")
    section = root
    for parent in parents:
        section = section_of(section.model_fields[parent].annotation) or section
    return section.__name__, name


def unread(texts: Mapping[Path, str], root: Kind = PolicyConfig) -> set[str]:
    used = reads_of(texts)
    return {key for key in keys_of(root) if section_and_key(key, root) not in used} - _READ_AS_DATA


@pytest.mark.parametrize("kind", [PolicyConfig, PreferenceConfig, SFTConfig])
def test_every_key_is_read_by_some_code(kind: Kind) -> None:
    assert unread(sources(), kind) == set()


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ({"learner.num_learners": 2}, "learner.num_learners has no effect in `rl-vlm sft`: remove it"),
        ({"learner.gpus_per_learner": 1}, "use sft.device"),
        ({"logging.trajectories_every": 1}, "logging.trajectories_every has no effect"),
        ({"model.train": "full"}, "model.train: full is for reinforcement learning"),
        ({"sft.epoch": 2}, "Did you mean sft.epochs"),
        ({"env.id": "Shapes-v0"}, "env.id has no effect in `rl-vlm sft`"),
    ],
)
def test_a_key_that_supervised_fine_tuning_ignores_is_refused(dotted: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        load_sft_config(None, [f"{key}={value}" for key, value in dotted.items()])


def test_a_saved_configuration_of_supervised_fine_tuning_is_read_again(tmp_path: Path) -> None:
    job = load_sft_config(None, ["learner.lr=1e-3", "sft.steps=3", "model.lora.rank=4"])
    save_config(job, tmp_path / "config.yaml")
    assert load_sft_config(tmp_path / "config.yaml") == job


def test_a_key_whose_reader_is_gone_is_found() -> None:
    """Also one whose name other sections have."""
    edits = {r"\b(self\._)?(run|config)\.rollout\.timeout_s": "60.0", r"\bconfig\.resources\.dashboard": "False"}
    texts = dict(sources())
    for path in texts:
        for read, constant in edits.items():
            texts[path] = re.sub(read, constant, texts[path])
    assert texts != sources()
    assert unread(texts) == {"rollout.timeout_s", "resources.dashboard"}


# --- what a run ignores


PREFERENCE = {"algorithm": {"name": "preference_sac"}}


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ({"learner.lr": 1e-3}, "learner.lr has no effect with algorithm.name preference_sac: use preference.sac.lr"),
        ({"learner.lr": 1e-5}, "learner.lr has no effect"),  # the default says as little
        ({"algorithm.iterations": 3}, "algorithm.iterations has no effect .* use preference.total_steps"),
        ({"rollout.num_env_runners": 3}, "rollout.num_env_runners .* use preference.collection.num_env_runners"),
        ({"rollout.group_size": 8}, "rollout.group_size has no effect .* remove it"),
        ({"evaluation.every": 5}, "evaluation.every has no effect .* use preference.evaluation.every"),
        ({"model.lora.rank": 4}, "model.lora.rank has no effect"),
        ({"env.isolation": "process"}, "env.isolation has no effect .* use preference.collection.num_env_runners"),
        ({"logging.trajectories_every": 1}, "logging.trajectories_every has no effect"),
    ],
)
def test_a_key_that_the_preference_loop_ignores_is_refused(dotted: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=f"^Config key {message}"):
        parse_config(apply_overrides(PREFERENCE, dotted))


def test_a_key_that_grpo_ignores_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"preference.total_steps has no effect .* ppo: use algorithm.iterations"):
        parse_config({"preference": {"total_steps": 5}})
    assert parse_config({"http": {"port": 9000}}).http.port == 9000  # serving is for every run


@pytest.mark.parametrize(
    ("serving", "message"),
    [
        (
            {"engine": "transformers", "vllm": {"max_num_seqs": 8}},
            "serving.vllm has no effect with serving.engine transformers",
        ),
        ({"vllm": {"enforce_eager": True}}, "serving.vllm has no effect with serving.engine auto"),
        ({"engine": "vllm", "max_rows": 8}, "serving.max_rows has no effect with serving.engine vllm"),
        ({"gpus_per_replica": 1, "num_threads": 2}, "serving.num_threads has no effect with serving.engine auto"),
    ],
)
def test_a_key_of_the_other_engine_is_refused(serving: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        parse_config({"serving": serving})


def test_keys_of_the_engine_that_runs_are_accepted() -> None:
    parse_config({"serving": {"max_rows": 8, "num_threads": 2}})
    parse_config({"serving": {"engine": "vllm", "vllm": {"max_num_seqs": 8}}})
    parse_config({"serving": {"gpus_per_replica": 0.5, "vllm": {"max_num_seqs": 8}}})


@pytest.mark.parametrize("data", [{}, {"serving": {"engine": "vllm", "vllm": {"max_num_seqs": 8}}}, PREFERENCE])
def test_a_saved_configuration_holds_what_its_run_reads(data: dict[str, Any], tmp_path: Path) -> None:
    run = parse_config(data)
    save_config(run, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == run == parse_config(run.model_dump())
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert set(kept["learner"]) >= {"num_learners", "gpus_per_learner"}
    assert ("lr" in kept["learner"], "rollout" in kept, "preference" in kept) == (
        (False, False, True) if data is PREFERENCE else (True, True, False)
    )


def test_a_saved_run_may_be_served_by_the_other_engine(tmp_path: Path) -> None:
    save_config(PolicyConfig(), tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", ["serving.engine=vllm"]).serving.max_rows == 512


# --- the tables name keys that exist


def test_counterparts_are_keys_of_different_kinds_of_runs() -> None:
    known = [set(keys_of(kind)) for kind in _KINDS]
    for pair in _COUNTERPARTS:
        assert all(any(key in keys for keys in known) for key in pair)
        assert any((pair[0] in keys) != (pair[1] in keys) or "env" in pair[0] for keys in known)
