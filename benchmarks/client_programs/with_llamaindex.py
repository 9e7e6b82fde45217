import base64

import pydantic
from cells import AGENT_URL, KEY, MODEL, URL, cell, png
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

shared = {"api_key": KEY, "is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
shared["temperature"] = 1.0  # at the default of 0.1 a model that answers noise repeats blanks
model = OpenAILike(model=MODEL, api_base=URL, max_tokens=500, **shared)
talk = OpenAILike(model="tiny", api_base=AGENT_URL, **shared)
SEE = [ChatMessage(role="user", blocks=[TextBlock(text="How many?"), ImageBlock(image=base64.b64encode(png()))])]


class Answer(pydantic.BaseModel):
    """What is seen."""

    yes: bool
    size: int = pydantic.Field(ge=0, le=9)


def look(x: int) -> str:
    """Look closer."""
    return "seen"


@cell("chat, image, stream, complete")
def _():
    assert model.chat(SEE).message.content and list(model.stream_chat(SEE))
    assert OpenAILike(model=MODEL, api_base=URL, api_key=KEY, max_tokens=20).complete("One, two").text is not None


@cell("structured_predict (json_schema)")
def _():
    llm = OpenAILike(model=MODEL, api_base=URL, max_tokens=500, should_use_structured_outputs=True, **shared)
    assert isinstance(llm.as_structured_llm(Answer).chat(SEE).raw, Answer)


@cell("structured by tools")
def _():
    assert isinstance(model.as_structured_llm(Answer).chat(SEE).raw, Answer)
    program = FunctionCallingProgram.from_defaults(
        Answer, llm=model, prompt_template_str="How many?", tool_required=True
    )
    assert isinstance(program(), Answer)


@cell("FunctionAgent, streamed")
async def _():
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(look)], llm=talk)
    assert str(await agent.run(SEE[0])) == "Two."
