"""Pages and code can be read: short sentences, pages of at most 2,000 words, the field's words, and anchors that exist."""

import ast
import io
import re
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = {"commands", "configuration", "errors", "http_api"}  # written by programs (`make docs`)
PAGES = sorted((ROOT / "docs").glob("*.md"))
READ = [page for page in PAGES if page.stem not in REFERENCE]
# Words that mean something else to our readers, and what to write.
WORDS = {
    r"\bpaid\b|\bpays\b": "rewarded",
    r"\brefuses?\b|\brefused\b": "rejects",
    r"\bfigures\b": "metrics, numbers (a picture is a figure)",
    r"\b[Ww]ho has\b|\b[Ww]ho wants\b|\b[Ww]ho needs\b": "name the actor: a client that has",
    r"\bthose that\b|\bthat there (are|is)\b|\bof theirs\b|\bwhat is (said|told)\b": "name the thing",
    r"(?<![\w.])\.\d": "0.97, not .97",
}

# In code a point may also begin a format or a file's suffix.
CODE_WORDS = {
    **{word: better for word, better in WORDS.items() if not word.endswith(r"\.\d")},
    r"(?<=[\s(])\.\d": "0.97, not .97",
    r"\b[Nn]obody\b": "no one, or name the thing",
    r"\b[Tt]old\b|\b[Tt]ells?\b": "says, warns, reports",
}
ROOMS = sorted(path for path in (ROOT / "rl_vlm").iterdir() if path.is_dir() or path.suffix == ".py")
# Words in their right place, by folder or file: pictures and geometry have figures, `judge/refused` is a metric's name,
# and the texts that models read stay as they are.
MEANT = {
    ("plots", "figures"), ("cli", "figures"), ("geo3k", "figures"), ("monitoring", "refused"), ("metrics.py", "refused"),
    ("templates.py", "told"), ("environment.py", "tells"), ("answers.py", "tell"), ("tokenizer.py", "that there is"),
}  # fmt: skip


def prose(text: str) -> str:
    """Without code, tables, headings and comments."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith(("#", "|", "![")))


def sentences(text: str) -> list[str]:
    """Of paragraphs and of items of lists."""
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose(text)):
        plain = re.sub(r"\]\([^)]*\)", "]", " ".join(block.split()))
        found += [one for one in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[])", plain) if len(one.split()) > 2]
    return found


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and MkDocs make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", READ, ids=lambda page: page.stem)
def test_a_page_reads_easily(page: Path) -> None:
    text = page.read_text()
    assert len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()) <= 2000, "split this page"
    lengths = [len(one.split()) for one in sentences(text)]
    assert statistics.median(lengths) <= 16
    too_long = [one for one in sentences(text) if len(one.split()) > 40]
    assert not too_long, too_long


@pytest.mark.parametrize("page", READ, ids=lambda page: page.stem)
def test_a_page_uses_the_words_of_the_field(page: Path) -> None:
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose(page.read_text()))
    found = {(match[0], better) for word, better in WORDS.items() for match in re.finditer(word, text)}
    assert not found


def code_texts(file: Path) -> Iterator[tuple[int, str]]:
    """Comments, texts without what `{}` puts into them, and names in words, each with its line."""
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        kind, text = tokenize.tok_name[token.type], token.string
        if kind == "NAME":
            yield token.start[0], text.replace("_", " ")
        elif kind in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            yield token.start[0], re.sub(r"\{(?:[^{}]|\{[^{}]*\})*\}", "", text)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.stem)
def test_code_uses_the_words_of_the_field(room: Path) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {match[0]!r}, better: {better}"
        for file in sorted(room.rglob("*.py") if room.is_dir() else [room])
        for line, text in code_texts(file)
        for word, better in CODE_WORDS.items()
        for match in re.finditer(word, text)
        if not {(file.parent.name, match[0]), (file.name, match[0])} & MEANT
    ]
    assert not found, "\n".join(found)


def test_no_class_has_the_name_of_another() -> None:
    places: dict[str, list[str]] = {}
    for file in (ROOT / "rl_vlm").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in places.items() if len(files) > 1}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_anchors_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert anchor in anchors((page.parent / target).resolve() if target else page), f"{target}#{anchor}"
