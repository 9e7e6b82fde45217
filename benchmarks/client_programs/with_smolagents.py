import io

from cells import AGENT_URL, KEY, MODEL, URL, cell, png
from PIL import Image
from smolagents import ChatMessage, CodeAgent, MessageRole, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=MODEL, api_base=URL, api_key=KEY, max_tokens=200)
talk = OpenAIModel(model_id="tiny", api_base=AGENT_URL, api_key=KEY)
picture = Image.open(io.BytesIO(png()))


@tool
def look(x: int) -> str:
    """Look closer.

    Args:
        x: where.
    """
    return "seen"


@cell("generate, image, stream, stop")
def _():
    asked = [
        ChatMessage(
            role=MessageRole.USER, content=[{"type": "text", "text": "How many?"}, {"type": "image", "image": picture}]
        )
    ]
    assert model.generate(asked, stop_sequences=["Observation:"]).content
    assert list(model.generate_stream(asked))


@cell("response_format, tool_choice required")
def _():
    asked = [ChatMessage(role=MessageRole.USER, content="How many?")]
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert '"yes"' in model.generate(asked, response_format=form).content
    assert model.generate(asked, tools_to_call_from=[look]).tool_calls[0].function.name == "look"


@cell("ToolCallingAgent")
def _():
    for stream in (False, True):
        agent = ToolCallingAgent([look], talk, stream_outputs=stream, max_steps=3, verbosity_level=0)
        assert agent.run("How many?", images=[picture]) == "Two."


@cell("CodeAgent, one step")
def _():
    for structured in (False, True):
        agent = CodeAgent([look], model, max_steps=1, use_structured_outputs_internally=structured, verbosity_level=0)
        agent.run("How many?", images=[picture])
        assert any(getattr(step, "model_output", None) for step in agent.memory.steps)
