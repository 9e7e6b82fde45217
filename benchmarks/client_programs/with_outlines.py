import io
from typing import Literal

import openai
import outlines
import pydantic
from cells import KEY, MODEL, URL, cell, png
from outlines.inputs import Image
from outlines.types import CFG, JsonSchema, Regex
from PIL import Image as Pictures

picture = Pictures.open(io.BytesIO(png()))
client = openai.OpenAI(base_url=URL, api_key=KEY)
vllm = outlines.from_vllm(client, MODEL)


class Answer(pydantic.BaseModel):
    yes: bool


SCHEMA = '{"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}'
TYPES = {
    "Literal": Literal["red", "blue"],
    "int": int,
    "bool": bool,
    "regex": Regex("[a-c]{3}"),
    "pydantic": Answer,
    "JSON schema": JsonSchema(SCHEMA),
    "grammar": CFG('start: "yes" | "no"'),
}
for name, kind in TYPES.items():

    @cell(f"from_vllm: {name}")
    def _():
        told = vllm(["How many?", Image(picture)], kind, max_tokens=300)
        assert {"Literal": told in ("red", "blue"), "pydantic": "yes" in told, "grammar": told in ("yes", "no")}.get(
            name, told
        )


@cell("from_vllm: stream, batch of samples")
def _():
    assert "".join(vllm.stream("How many?", Literal["red", "blue"])) in ("red", "blue")
    assert len(vllm("How many?", Literal["red", "blue"], n=2)) == 2


@cell("from_openai: pydantic")
def _():
    Answer.model_validate_json(outlines.from_openai(client, MODEL)("How many?", Answer, max_tokens=300))
