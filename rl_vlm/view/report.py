"""A run as one file: the page with the answers that it asks for, which opens without a server and without a network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic_core import to_json

from rl_vlm.files import write_atomic
from rl_vlm.runs.remote_folder import RunDir
from rl_vlm.types import UserInputError
from rl_vlm.view.library import Library
from rl_vlm.view.server import PAGE

PICTURE_BYTES = 14 * 2**20  # of all pictures and films
_SIDES = (768, 512, 384, 256, 128, 64)  # to which pictures are made smaller until they fit
_SMALL_BYTES = 4096
_QUALITY = 82  # of WebP


def write_report(runs: Sequence[RunDir], out: Path, episodes: int) -> dict[str, Any]:
    """Write the runs as one HTML file with at most so many of their episodes. Returns what it holds."""
    library = Library(runs, live=False)
    answers: dict[str, Any] = {"runs": library.answer("runs")}
    if not answers["runs"]["runs"]:
        raise UserInputError(f"There is no run in {', '.join(map(str, runs))}.")
    wanted: dict[str, set[str]] = {}
    films: dict[str, bytes] = {}
    kept = 0
    for run, reader in library.readers().items():
        place = f"runs/{run}"
        answers |= {
            f"{place}{rest}": library.answer(f"{place}{rest}") for rest in ("", "/pairs", "/films", "/episodes")
        }
        listed = answers[f"{place}/episodes"]
        chosen = choose_episodes(listed, (episodes - kept) // (len(library.readers()) - len(wanted)))
        answers[f"{place}/episodes"] = {
            key: [column[k] for k in chosen] if isinstance(column, list) else column for key, column in listed.items()
        }
        kept += len(chosen)
        shown = wanted.setdefault(run, set())
        for name in (listed["id"][k] for k in chosen):
            episode = answers[f"{place}/episodes/{name}"] = library.answer(f"{place}/episodes/{name}")
            shown |= {
                part["picture"]["sha"]
                for message in episode["messages"]
                for part in message["parts"]
                if "picture" in part
            }
        pairs = answers[f"{place}/pairs"]
        shown |= {sha for side in ("first", "second") for frames in pairs[side] for sha in frames}
        last = reader.films()[-1:]
        films |= {f"{run}/films/{film['name']}": reader.file("films", film["name"]) for film in last}
    files = {name: _uri("image/gif", film) for name, film in films.items() if len(film) < PICTURE_BYTES // 4}
    files |= _pictures(library, wanted, PICTURE_BYTES - sum(map(len, files.values())))
    packed = {place: _packed(answer) for place, answer in answers.items()}
    write_atomic(out, page_of({"answers": packed, "files": files}))
    return {"file": str(out), "episodes": kept, "pictures": len(files), "bytes": out.stat().st_size}


def choose_episodes(listed: dict[str, list[Any]], count: int) -> list[int]:
    """Places of at most `count` episodes: the newest of training, as many as half of them where evaluations fill the
    rest; of the last and the first evaluation the same items, drawn evenly over environments and views."""
    kinds = list(zip(listed["kind"], listed["iteration"], strict=True))
    training = [place for place, (kind, _) in enumerate(kinds) if kind == "train"]
    held_out = sorted({iteration for kind, iteration in kinds if kind == "eval"})
    ends = list(dict.fromkeys((*held_out[-1:], *held_out[:1])))
    items: dict[tuple[Any, ...], list[int]] = {}
    for place, (kind, iteration) in enumerate(kinds):
        if kind == "eval" and iteration in ends:
            key = tuple(listed[name][place] for name in ("env", "variant", "view", "index"))
            items.setdefault(key, []).append(place)
    wanted = max(count - len(training), count // 2)
    rows = list(items.values())
    step = max(len(rows) * len(ends) / max(wanted, 1), 1.0)
    chosen = [place for k in range(int(len(rows) / step)) for place in rows[int(k * step)]]
    newest = sorted(training, key=lambda place: -kinds[place][1])
    return sorted(chosen + newest[: count - len(chosen)])


def page_of(content: Any) -> str:
    """The page with everything inside. Its policy allows the one script that is in it, and nothing from elsewhere."""
    script, style = ((PAGE / name).read_text(encoding="utf-8") for name in ("app.js", "app.css"))
    script = script.replace("</script", r"<\/script")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    inside = json.dumps(content).replace("<", r"\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>rl_vlm report</title>'
        f'<link rel="icon" href="data:,"><style>{style}</style></head><body><div id="app"></div>'
        f'<script id="report" type="application/json">{inside}</script><script type="module">{script}</script>'
        "</body></html>\n"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _packed(answer: Any) -> str:
    return base64.b64encode(gzip.compress(to_json(answer, inf_nan_mode="null"), mtime=0)).decode()


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _pictures(library: Library, wanted: dict[str, set[str]], limit: int) -> dict[str, str]:
    """All pictures as data URIs, made so small that they fit."""
    for side in _SIDES:
        made = {
            f"{run}/images/{name}": _smaller(library.reader(run).file("images", name), side)
            for run, names in wanted.items()
            for name in sorted(names)
        }
        if sum(map(len, made.values())) <= limit:
            break
    return made


def _smaller(png: bytes, side: int) -> str:
    with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
        image.thumbnail((side, side))
        smaller = io.BytesIO()
        image.convert("RGB").save(smaller, "WEBP", quality=_QUALITY)
    webp = smaller.getvalue()
    # A drawing may be smaller as it is, and is sharper.
    keeps = len(png) <= max(len(webp), _SMALL_BYTES) and max(image.size) < side
    return _uri("image/png", png) if keeps else _uri("image/webp", webp)
