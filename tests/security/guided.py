"""Fuzzing that is guided by coverage: libFuzzer, through Atheris, changes bytes and keeps what reaches new lines of ours.

    python tests/security/guided.py TARGET [--seconds 60] [--corpus FOLDER]

TARGET is one of fuzz_targets.py. Inputs that reach new lines stay in FOLDER, where a later call goes on. What breaks a target is
written beside it, and the code is 77; `python tests/security/guided.py TARGET --input FILE` shows the traceback again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent))
with atheris.instrument_imports(include=["rl_vlm"]):
    from fuzz_targets import TARGETS, Target

_LONGEST, _SLOWEST_S = 8192, 20  # bytes of an input; seconds that one may take


def prepare(target: Target, folder: Path) -> list[str]:
    """Write seeds and words, and return libFuzzer's arguments for them."""
    for number, seed in enumerate(target.seeds):
        (folder / f"seed{number}").write_bytes(seed)
    arguments = [str(folder)]
    if target.words:
        escaped = ["".join(f"\\x{byte:02x}" for byte in word.encode()) for word in target.words]
        words = folder.with_name(folder.name + ".words")
        words.write_text("".join(f'"{word}"\n' for word in escaped))
        arguments.append(f"-dict={words}")
    return arguments


def main() -> None:
    """Command line. Atheris ends the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="a folder of inputs; without it one that is thrown away")
    parser.add_argument("--input", type=Path, help="check this file alone")
    given = parser.parse_args()
    target = TARGETS[given.target]
    if given.input:
        target.check(given.input.read_bytes())
        return
    corpus = given.corpus or Path(tempfile.mkdtemp(prefix="rl-vlm-fuzz-")) / given.target
    corpus.mkdir(parents=True, exist_ok=True)
    limits = [
        f"-max_total_time={given.seconds}",
        f"-max_len={_LONGEST}",
        f"-timeout={_SLOWEST_S}",
        "-rss_limit_mb=4096",
    ]
    found = [f"-artifact_prefix={corpus.parent}/broken-{given.target}-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *prepare(target, corpus), *limits, *found], target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
