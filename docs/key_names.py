"""Write rl_vlm/config/elsewhere.csv, what other systems call our keys, from the tables of the pages for their users.

    python docs/key_names.py

An unknown key whose name is another system's is answered with ours, and with what the table says beside the key, such
as its unit.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from rl_vlm.config.policy import PolicyConfig
from rl_vlm.config.preference import PreferenceConfig
from rl_vlm.config.section import keys_of
from rl_vlm.config.sft import SFTConfig

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "rl_vlm/config/elsewhere.csv"
PAGES = {
    "trl": "TRL",
    "verl": "verl",
    "prime_rl": "prime-rl",
    "molt": "Molt",
    "slime": "slime",
    "vlm_gym": "vlm-gym",
    "rl_vlm_f": "RL-VLM-F",
    "other_environments": "Stable-Baselines3 or CleanRL",
}
_QUOTED = re.compile(r"`([^`]+)`")
_NAME = re.compile(r"(?:--)?[A-Za-z][\w.-]*")
_PLAIN = re.compile(r"`[^`]+`(?: \([^)]*\))?|\b(?:or|and)\b|[,\s]")  # our keys with their defaults, and nothing else


def rows() -> Iterator[tuple[str, str, str, str]]:
    """System, its name of a key, our keys, and what else the table says."""
    known = {*keys_of(PolicyConfig), *keys_of(PreferenceConfig), *keys_of(SFTConfig)}
    for page, system in PAGES.items():
        for section in (ROOT / f"docs/{page}.md").read_text().split("\n## "):
            for line in section.splitlines():
                cells = line.strip("| ").split(" | ") if line.startswith("|") else []
                if len(cells) < 2:
                    continue
                names = [
                    name for name in _QUOTED.findall(cells[0]) if _NAME.fullmatch(name) and name not in ("None", "null")
                ]
                keys = [key for text in _QUOTED.findall(cells[1]) if (key := re.split(r"[:=]", text)[0]) in known]
                if not keys and not section.startswith("Keys"):
                    continue
                said = cells[1] if not keys or "` and `" in cells[1] or _PLAIN.sub("", cells[1]) else ""
                note = cells[2].strip("| ") if keys and len(cells) > 2 else ""
                pairs = [[key] for key in keys] if len(keys) == len(names) else [keys] * len(names)
                for name, ours in zip(names, pairs, strict=True):
                    advice = f"{said or ' and '.join(ours)}; {note}" if note else said
                    advice = re.sub(r" \(\[[^]]+\]\([^)]+\)\)|(?<=`) \([\d.e-]+\)", "", advice)
                    advice = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", advice).replace("`", "")
                    yield system, name.lstrip("-").replace("-", "_"), " ".join(dict.fromkeys(ours)), advice


def table() -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("system", "name", "keys", "advice"))
    writer.writerows(dict.fromkeys(rows()))
    return text.getvalue()


if __name__ == "__main__":
    OUT.write_text(table())
    print(f"Wrote {OUT.relative_to(ROOT)}.")
