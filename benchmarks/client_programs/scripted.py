"""Serves a model that says what agents wait for: the first answer calls the tool `look`, the next one ends the talk."""

import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np

from rl_vlm.config import HTTPSection
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.http.app import ModelApp
from rl_vlm.http.backend import ServedModel
from rl_vlm.http.server import HTTPServer, bind
from rl_vlm.models.loading import load_text_side
from rl_vlm.types import POLICY, Completion, GenerationRequest, Sample, SampleChunk, StopReason
from rl_vlm.zoo.tiny.model import tiny_model_path

ANSWER = {"yes": True, "size": 3}
ENDINGS = {"final_answer": {"answer": "Two."}, "final_result": ANSWER, "submit": {"answer": "Two."}}
CONTEXT = 65536


class Scripted:
    def __init__(self, folder: Path) -> None:
        self.text = load_text_side(folder)

    async def models(self) -> dict[str, ServedModel]:
        return {"tiny": ServedModel(POLICY, BASE_MODEL)}

    def _said(self, request: GenerationRequest) -> np.ndarray:
        codec = self.text.codec
        prompt = codec.text_of(request.prompt_ids)
        name, arguments = "look", {"x": 5}
        if "<tool_response>" in prompt or '"look"' not in prompt:
            name, arguments = next(((n, a) for n, a in ENDINGS.items() if f'"name": "{n}"' in prompt), ("", {}))
        if not name:
            grammar = request.sampling.grammar
            said = json.dumps(ANSWER) if '"yes"' in prompt + (grammar.text if grammar else "") else "Two."
            if said != "Two." and grammar is None:
                said = f"```json\n{said}\n```"
        elif (form := request.sampling.grammar) and form.kind == "json_schema":  # a list of calls was asked for
            said = json.dumps([{"name": name, "parameters": arguments}])
        else:
            said = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        return np.append(codec.encode_text(said), np.int32(codec.end_of_turn_id))

    async def call(self, requests: list[GenerationRequest]) -> list[Completion]:
        (request,) = requests
        ids = self._said(request)
        sample = Sample(ids, np.zeros(len(ids), np.float32), StopReason.END_OF_TURN)
        return [Completion(request.request_id, request.prompt_ids, (sample,) * request.sampling.n, BASE_MODEL)]

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampleChunk, None]:
        ids = self._said(request)
        for place, token in enumerate(ids):
            last = StopReason.END_OF_TURN if place == len(ids) - 1 else None
            yield SampleChunk(0, np.array([token]), np.zeros(1, np.float32), BASE_MODEL, last)

    async def health(self) -> None: ...

    async def metrics(self) -> str:
        return ""


if __name__ == "__main__":
    backend, limits = Scripted(tiny_model_path()), HTTPSection()
    gate = ModelApp(backend, backend.text, limits, max_context=CONTEXT).gate  # type: ignore[arg-type]
    sock = bind("127.0.0.1", int(sys.argv[1]))
    HTTPServer(gate, sock, limits, lambda: print("listens", flush=True)).run([sock])
