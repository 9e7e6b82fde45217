"""Load the user's own code: "package.module[:attribute]" or "path/to/file.py[:attribute]"."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_vlm.envs.foreign.stand_ins import with_stand_ins
from rl_vlm.files import did_you_mean, resolved
from rl_vlm.registry import suggestion
from rl_vlm.types import UserInputError

_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_LOCK = threading.Lock()


def is_spec(text: str) -> bool:
    """Whether the text names a module or file (it has a dot, slash or colon) rather than an id such as "Shapes-v0"."""
    target, _ = split_spec(text)
    return target.endswith(".py") or bool(_MODULE_NAME.fullmatch(target) and (":" in text or "." in target))


def split_spec(spec: str) -> tuple[str, str]:
    """("module" or "file.py", "attribute" or ""); a folder's name may hold a colon, too."""
    target, colon, attribute = spec.rpartition(":")
    return (target, attribute) if colon else (spec, "")


def load_object(spec: str) -> Any:
    """The attribute that a spec names, or its module if it names none. Raises UserInputError."""
    target, attribute = split_spec(spec)
    try:
        module = _load(target)
    except UserInputError:
        raise
    except ModuleNotFoundError as error:
        name = error.name or str(error)
        top = name.partition(".")[0]
        raise UserInputError(
            f"{target} cannot be imported: there is no module {name}; install {top}, or run again with "
            f"PYTHONPATH=FOLDER, where FOLDER holds {top}."
        ) from error
    except Exception as error:  # whatever the user's module raises while it runs
        raise UserInputError(f"{target} cannot be imported ({type(error).__name__}: {error}).") from error
    if not attribute:
        return module
    if not hasattr(module, attribute):
        own = [name for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]
        raise UserInputError(
            f"{target} has no {attribute!r}; it has {', '.join(own[:10]) or 'nothing of its own'}."
            f"{suggestion(attribute, own)}"
        )
    return getattr(module, attribute)


def absolute_spec(spec: str) -> str:
    """The spec with an absolute file path, so that another working directory does not change its meaning."""
    target, attribute = split_spec(spec)
    return f"{resolved(target)}{':' * bool(attribute)}{attribute}" if target.endswith(".py") else spec


def _load(target: str) -> ModuleType:
    """The module or file; its framework may be a stand-in."""
    if target.endswith(".py"):
        path = resolved(target)
        return with_stand_ins(lambda: _load_file(path))
    if not _MODULE_NAME.fullmatch(target):
        raise UserInputError(f"{target!r} is not the name of a module.")
    _extend_path(Path.cwd())
    return with_stand_ins(lambda: importlib.import_module(target))


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserInputError(f"There is no file {path}: write it, or correct the path.{did_you_mean(path, '*.py')}")
    digest = hashlib.sha256(f"{path}:{path.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    with _LOCK:
        name = f"{_package_of(path.parent)}.{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_{digest}"
        if name in sys.modules:
            return sys.modules[name]
        _extend_path(path.parent)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # the name ends with .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up while the file runs
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _package_of(folder: Path) -> str:
    """The name of a package that is the folder, so that a file in it may import its neighbours relatively."""
    name = f"_rl_vlm_user_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        package = ModuleType(name, f"The folder {folder}.")
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name


def _extend_path(folder: Path) -> None:
    """Let user code import its neighbours; at the end of the path, so that nothing installed is shadowed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def load_plugins(names: Sequence[str]) -> None:
    """Import a user's modules (`package.module`) and files (`path/to/file.py`), each once per process, which register
    environments, losses, estimators and rewards. Raises UserInputError."""
    for name in names:
        load_object(name)
