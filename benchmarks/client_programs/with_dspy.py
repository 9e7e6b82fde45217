from typing import Literal

import dspy
from cells import AGENT_URL, KEY, MODEL, PICTURE, URL, cell
from dspy import lm15

# dspy asks for schemas and calls only where it has been told that the server knows them.
access = lm15.AccessPolicy(
    "served", lm15.EndpointSupport(complete=True, stream=True, models=True), auth_modes=("bearer",), base_url=URL
)
lm15.register_provider(
    lm15.ProviderDefinition.chat(access, compat=lm15.OpenAIChatCompat.preset("vllm")),
    supports=lm15.ModelSupport(function_calling=True, response_schema=True),
)
there = {"api_key": KEY, "cache": False}
model = dspy.LM(f"served/{MODEL}", api_base=URL, max_tokens=500, **there)
plain, talk = dspy.LM("openai/tiny", api_base=AGENT_URL, **there), dspy.LM("served/tiny", api_base=AGENT_URL, **there)


class Count(dspy.Signature):
    """Count."""

    image: dspy.Image = dspy.InputField()
    yes: bool = dspy.OutputField()
    size: Literal[1, 2, 3] = dspy.OutputField()


def look(x: int) -> str:
    """Look closer."""
    return "seen"


@cell("LM, n, text completion")
def _():
    assert model("How many?")[0] and plain("How many?")[0] and len(plain("How many?", n=2, temperature=1.0)) == 2
    assert dspy.LM(f"openai/{MODEL}", api_base=URL, model_type="text", max_tokens=20, **there)("How many?")


@cell("LM, responses")
def _():
    assert dspy.LM(f"openai/{MODEL}", api_base=URL, model_type="responses", max_tokens=50, **there)("How many?")


@cell("Predict, JSONAdapter, image")
def _():
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        told = dspy.Predict(Count)(image=dspy.Image(PICTURE))
    assert told.size in (1, 2, 3) and isinstance(told.yes, bool)


@cell("Predict, ChatAdapter, which falls back on JSON")
def _():
    with dspy.context(lm=model):
        assert dspy.Predict(Count)(image=dspy.Image(PICTURE)).size in (1, 2, 3)
    with dspy.context(lm=plain):
        assert dspy.Predict(Count)(image=dspy.Image(PICTURE)).size in (1, 2, 3)


@cell("tools as calls of the API")
def _():
    class Act(dspy.Signature):
        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        outputs: dspy.ToolCalls = dspy.OutputField()

    with dspy.context(lm=talk, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        told = dspy.Predict(Act)(question="How many?", tools=[dspy.Tool(look)])
    assert told.outputs.tool_calls[0].name == "look"


@cell("streamify")
async def _():
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        program = dspy.streamify(dspy.Predict("question -> answer"))
        *_, last = [part async for part in program(question="How many?")]
    assert last.answer is not None
