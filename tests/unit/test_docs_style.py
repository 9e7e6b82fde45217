"""The pages can be read: short sentences, pages of at most 2,000 words, the field's words, and anchors that exist."""

import re
import statistics
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


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_anchors_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert anchor in anchors((page.parent / target).resolve() if target else page), f"{target}#{anchor}"
