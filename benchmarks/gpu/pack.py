"""Make the luggage of `quarter_hour.py`: what a bare machine with torch lacks, in three files of at most 60 MiB.

    python benchmarks/gpu/pack.py luggage

It fetches wheels for Python 3.12 on Linux (x86_64) from the package index, in the versions of requirements/gpu.txt, and
leaves out of vLLM what Qwen3-VL on an H200 does not need. vLLM's compiled parts use torch's stable ABI: what is kept
loads into torch 2.11 as well. Both pieces of vLLM belong to one archive, which is cut in two.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 60 << 20  # bytes of a file
# What the learner imports, and what vLLM imports beside it to sample from Qwen3-VL.
LEARNER = ("annotated-types", "pydantic", "pydantic-core", "transformers", "typing-inspection")
ENGINE = (
    "apache-tvm-ffi", "blake3", "cachetools", "cbor2", "compressed-tensors", "depyf", "dill", "fastapi", "httpcore2",
    "httpx2", "jiter", "jsonschema", "jsonschema-specifications", "llguidance", "lark", "loguru", "msgspec", "openai",
    "oss-harmony", "partial-json-parser", "pybase64", "python-multipart", "pyzmq", "referencing", "rpds-py",
    "setproctitle", "sniffio", "starlette", "truststore", "vllm", "xgrammar",
)  # fmt: skip
# Kernels for other models, precisions and cards, and vLLM's server.
UNUSED = re.compile(
    r"vllm/(vllm-rs|_moe_C|_flashmla|_flashkda|_deepselect|_qutlass|vllm_flash_attn/_vllm_fa2"
    r"|third_party/(deep_gemm|fmha_sm100|tml_fa4))"
)
_LINUX = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]


def fetch(names: tuple[str, ...], folder: Path) -> None:
    """The wheels of these packages, unpacked into `folder`."""
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "requirements/gpu.txt").read_text(), re.MULTILINE))
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
             "--python-version=3.12", "--implementation=cp", *_LINUX, "--platform=manylinux2014_x86_64",
             f"--dest={wheels}", *(f"{name}=={pinned[name]}" for name in names)],
            check=True,
        )  # fmt: skip
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if not UNUSED.match(name)])


def packed(folder: Path) -> bytes:
    """All files of the folder as one compressed archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=1) as archive:
        archive.add(folder, ".")
    return content.getvalue()


def main(target: Path) -> None:
    """Write the three files into the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    pieces = {}
    with tempfile.TemporaryDirectory() as place:
        for name, names in (("learner", LEARNER), ("engine", ENGINE)):
            fetch(names, Path(place) / name)
            pieces[name] = packed(Path(place) / name)
    half = len(pieces["engine"]) // 2
    for name, content in (
        ("1.tar.xz", pieces["learner"]),
        ("2.cut", pieces["engine"][:half]),
        ("3.cut", pieces["engine"][half:]),
    ):
        assert len(content) <= LIMIT, f"{name} has {len(content)} bytes"
        (target / name).write_bytes(content)
        print(f"{target / name}: {len(content) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
