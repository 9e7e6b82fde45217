"""Which of 30 defects, planted one by one into a copy of the repository, the tests find.

    python benchmarks/mutations.py                      # all, with the tests of `make test`
    python benchmarks/mutations.py --only gae --marks "" # one, with all tests

The tests that name the changed module run first, up to the first failure; then all others. A defect is found when a
test fails that passes without it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutation:
    """A defect: `old` stands once in the package and becomes `new`."""

    name: str
    old: str
    new: str


MUTATIONS = [
    # What is learned from.
    Mutation("group advantage: sign", "centred = rewards - rewards.mean()", "centred = rewards.mean() - rewards"),
    Mutation("group advantage: biased deviation", "rewards.std(ddof=1) + eps", "rewards.std(ddof=0) + eps"),
    Mutation("rloo: inverted factor", "centred * size / (size - 1)", "centred * (size - 1) / size"),
    Mutation("gae: previous value", "deltas[:-1] += gamma * values[1:]", "deltas[1:] += gamma * values[:-1]"),
    Mutation("overlong penalty: no buffer", "(max_new_tokens - buffer - length) / buffer", "(max_new_tokens - length) / buffer"),
    Mutation("token mean: over sequences", "return lambda length: 1.0 / tokens", "return lambda length: 1.0 / sequences"),
    # The loss.
    Mutation("clip: the larger objective", "torch.minimum(ratio * advantage, bounded * advantage)", "torch.maximum(ratio * advantage, bounded * advantage)"),
    Mutation("kl k3: sign", "return difference.exp() - 1 - difference", "return difference.exp() - 1 + difference"),
    Mutation("entropy bonus: sign", "token_loss - settings.entropy_coef * entropy", "token_loss + settings.entropy_coef * entropy"),
    Mutation("mismatch: inverted ratio", "gap, cap = (old - behaviour).detach()", "gap, cap = (behaviour - old).detach()"),
    Mutation("epochs: the newest policy as old", "if micro.old is None:", "if True:"),
    # Tokens, masks, images.
    Mutation("packing: one token late", "np.where(sampled == prefix, prefix - 1,", "np.where(sampled == prefix, prefix,"),
    Mutation("packing: the prompt's images again", "trajectory.images[self._prompt_images(trajectory) if number else 0 :]", "trajectory.images"),
    Mutation("trajectory: a turn at token 0", "edges = [1, *(edge", "edges = [0, *(edge"),
    Mutation("special strings are parsed", "self._plain.encode_special_tokens = True", "self._plain.encode_special_tokens = False"),
    Mutation("special tokens may be sampled", "special = {i for text, i in self._special_ids.items() if i != self.end_of_turn_id and text not in _CALL_MARKS}", "special = set[int]()"),
    Mutation("image tokens are not compared", "if not np.array_equal(completion.prompt_ids, expected):", "if len(completion.prompt_ids) < 0:"),
    Mutation("sampling: the first token again", "rows.tokens[np.arange(len(rows)), rows.produced - 1]", "rows.tokens[np.arange(len(rows)), rows.produced * 0]"),
    # Versions.
    Mutation("an older version answers", "policy.loaded >= min_version and not", "policy.loaded >= min_version - 1 and not"),
    Mutation("a version is published twice", "published.version <= newest.version", "published.version < newest.version"),
    Mutation("acknowledged with another hash", "if known is None or known.sha256 != sha256:", "if known is None:"),
    Mutation("groups are one version too old", "version - self._version(group) <= self._max_lag]", "version - self._version(group) <= self._max_lag + 1]"),
    Mutation("a resume draws anew", 'self.rng.bit_generator.state = state["rng"]', "pass"),
    Mutation("a changed checkpoint is read", "if file_digest(folder / name) != digest:", "if not digest:"),
    # Doors.
    Mutation("any token", "if not hmac.compare_digest(given.strip().encode(), self._token)", "if not given.strip()"),
    Mutation("a body without end", "if size > limit:", "if size > 2**62:"),
    # Preferences.
    Mutation("label flipped in the second order", "labels = [shown[0], *(label.swapped() for label in shown[1:])]", "labels = list(shown)"),
    Mutation("reward model learns the opposite", "target = (1 - low, low) if label.value == 0 else (low, 1 - low)", "target = (low, 1 - low) if label.value == 0 else (1 - low, low)"),
    Mutation("truncated episodes end for the critic", "self.continues[rows] = ~batch.terminated", "self.continues[rows] = ~(batch.terminated | batch.truncated)"),
    Mutation("sac: entropy is a cost", "(next_q - alpha * log_probs)", "(next_q + alpha * log_probs)"),
]  # fmt: skip


def place_of(mutation: Mutation, root: Path) -> Path:
    found = [file for file in sorted((root / "rl_vlm").rglob("*.py")) if mutation.old in file.read_text()]
    if len(found) != 1 or found[0].read_text().count(mutation.old) != 1:
        sys.exit(f"{mutation.name}: {mutation.old!r} must stand once in the package, and is in {found}")
    return found[0]


def run_tests(copy: Path, files: list[str], marks: str, timeout_s: float) -> str:
    """The first test that fails, or an empty string."""
    if not files:
        return ""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", "-m", marks, *files]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no end within {timeout_s:g} s"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1, 5) and not failed:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return failed[0] if failed else ""


def find(mutation: Mutation, suites: list[str], marks: str, timeout_s: float) -> dict[str, object]:
    """Plant one defect into a copy and look for a test that fails."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for file in filter(None, tracked.decode().split("\0")):
            if (ROOT / file).exists():
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, copy / file, follow_symlinks=False)
        module = place_of(mutation, copy)
        module.write_text(module.read_text().replace(mutation.old, mutation.new))
        dotted = ".".join(module.relative_to(copy).with_suffix("").parts)
        places = [copy / suite for suite in suites]
        files = [
            file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("test_*.py")))
        ]
        tests = [str(file.relative_to(copy)) for file in files]
        direct = [file for file in tests if re.search(rf"{re.escape(dotted)}\b", (copy / file).read_text())]
        by = run_tests(copy, direct, marks, timeout_s)
        by = by or run_tests(copy, [file for file in tests if file not in direct], marks, timeout_s)
    seconds = round(time.monotonic() - started)
    return {**asdict(mutation), "module": str(module.relative_to(copy)), "by": by, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Those whose name has this text.")
    parser.add_argument(
        "--suites",
        nargs="*",
        help="Folders or files of tests.",
        default=["tests/unit", "tests/security", "tests/integration", "tests/e2e"],
    )
    parser.add_argument("--marks", default="not acceptance and not slow", help="Of pytest's -m.")
    parser.add_argument("--timeout", type=float, default=1800.0, help="Seconds for one run of tests.")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for mutation in MUTATIONS:
        if given.only in mutation.name:
            place_of(mutation, ROOT)
            rows.append(find(mutation, given.suites, given.marks, given.timeout))
            print(
                f"{mutation.name:42} {rows[-1]['module']:34} {rows[-1]['seconds']:5} s  {rows[-1]['by'] or '-'}",
                flush=True,
            )
            if given.out:
                given.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{sum(bool(row['by']) for row in rows)} of {len(rows)} were found")


if __name__ == "__main__":
    main()
