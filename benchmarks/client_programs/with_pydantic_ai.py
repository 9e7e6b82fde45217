import pydantic
from cells import AGENT_URL, KEY, MODEL, URL, cell, png
from pydantic_ai import Agent, BinaryContent, NativeOutput, PromptedOutput, ToolOutput, ToolReturn
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Answer(pydantic.BaseModel):
    """What is seen."""

    yes: bool
    size: int = pydantic.Field(ge=0, le=9)


there, scripted = OpenAIProvider(base_url=URL, api_key=KEY), OpenAIProvider(base_url=AGENT_URL, api_key=KEY)
SEE = ["How many?", BinaryContent(png(), media_type="image/png")]
short = ModelSettings(max_tokens=500)
KINDS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


def look(x: int) -> ToolReturn:
    """Look closer."""
    return ToolReturn(return_value="seen", content=["Here:", BinaryContent(png(), media_type="image/png")])


for kind, of in KINDS.items():
    model, talk = of(MODEL, provider=there), of("tiny", provider=scripted)

    @cell(f"{kind}: text, stream")
    async def _():
        assert (await Agent(model, model_settings=short).run(SEE)).output
        async with Agent(model, model_settings=short).run_stream(SEE) as told:
            assert [part async for part in told.stream_text()]

    for form in (NativeOutput, ToolOutput):

        @cell(f"{kind}: {form.__name__}")
        async def _():
            told = await Agent(model, output_type=form(Answer), model_settings=short).run(SEE)
            assert isinstance(told.output, Answer)

    @cell(f"{kind}: PromptedOutput")
    async def _():
        assert isinstance((await Agent(talk, output_type=PromptedOutput(Answer)).run(SEE)).output, Answer)

    @cell(f"{kind}: tools, a tool returns a picture")
    async def _():
        assert (await Agent(talk, tools=[look]).run(SEE)).output == "Two."
        assert isinstance((await Agent(talk, tools=[look], output_type=ToolOutput(Answer)).run(SEE)).output, Answer)

    @cell(f"{kind}: tools, then NativeOutput")
    async def _():
        told = await Agent(talk, tools=[look], output_type=NativeOutput(Answer)).run(SEE)
        assert isinstance(told.output, Answer) and len(told.all_messages()) == 4
