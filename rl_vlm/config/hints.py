"""What is wrong with a configuration, in one sentence; unknown keys name the nearest known one."""

from __future__ import annotations

import difflib

from pydantic import BaseModel, ValidationError

from rl_vlm.config.run import RunConfig


def explain(error: ValidationError) -> str:
    """One sentence on the first thing that is wrong."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        section: type[BaseModel] = RunConfig
        for part in location[:-1]:
            annotation = section.model_fields[part].annotation
            if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
                break
            section = annotation
        prefix = ".".join(location[:-1])
        known = {(f"{prefix}.{name}" if prefix else name): name for name in section.model_fields}
        nearest = difflib.get_close_matches(location[-1], known.values(), n=1, cutoff=0.5)
        if not nearest:
            everywhere = _all_keys(RunConfig)
            found = [full for full in everywhere if full.rsplit(".", 1)[-1] == location[-1]]
            hint = f" Did you mean {found[0]}?" if found else f" Known keys here: {', '.join(known.values())}."
            return f"Unknown config key {key}.{hint}"
        return f"Unknown config key {key}. Did you mean {f'{prefix}.' if prefix else ''}{nearest[0]}?"
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        return f"Config: {message}."
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"Config key {key or 'file'}: {message}; got {shown}."


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys.extend(_all_keys(info.annotation, f"{prefix}{name}."))
    return keys
