import pydantic
from cells import KEY, MODEL, URL, cell
from guidance import assistant, gen, json, select, system, user
from guidance.models.experimental import VLLMModel


class Answer(pydantic.BaseModel):
    yes: bool


def told(*parts):
    lm = VLLMModel(MODEL, base_url=URL, api_key=KEY, echo=False)
    with system():
        lm += "Count."
    with user():
        lm += "How many?"
    with assistant():
        for part in parts:
            lm += part
    return lm


@cell("gen")
def _():
    assert told(gen("a", max_tokens=20))["a"]


@cell("regex")
def _():
    assert len(told(gen("a", regex="[a-c]{3}"))["a"]) == 3


@cell("select")
def _():
    assert told(select(["red", "blue"], name="a"))["a"] in ("red", "blue")


@cell("json")
def _():
    Answer.model_validate_json(told(json("a", schema=Answer, max_tokens=300))["a"])


@cell("grammar with text")
def _():
    assert "I see " in str(told("I see " + select(["one", "two"], name="a") + " shapes"))
