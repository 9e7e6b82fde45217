"""Chat messages, tools and tool calls between OpenAI's form, which verifiers uses, and a conversation in text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rl_vlm.envs.errors import EnvError
from rl_vlm.envs.interactive import to_message
from rl_vlm.envs.tools import CLOSE, OPEN, THOUGHT_END, ToolCallError, parse_tool_call
from rl_vlm.types import Message, Observation

MAX_CALLS = 16  # of one turn; further ones are left out

# The form that Qwen's and Hermes' chat templates give to tools.
TOOLS = """# Tools

You may call one or more functions. Their signatures, within <tools></tools>:
<tools>
{tools}
</tools>

For each call, return a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""


def to_observation(messages: Sequence[Any], tools: Sequence[Any] | None = None) -> Observation:
    """The conversation of OpenAI's messages; `tools` are described in its system message."""
    shown = [_to_message(message) for message in messages]
    if tools:
        text = TOOLS.format(tools="\n".join(json.dumps(tool) for tool in tools))
        if shown and shown[0].role == "system":
            shown[0] = Message("system", (*shown[0].parts, f"\n\n{text}"))
        else:
            shown.insert(0, Message.of("system", text))
    return Observation(tuple(shown))


def _to_message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise EnvError(f"A message must be a dict with role and content, not a {type(message).__name__}.")
    calls = message.get("tool_calls")
    if not calls:
        return to_message(message)
    blocks = [
        f'{OPEN}\n{{"name": {json.dumps(call["function"]["name"])}, "arguments": {call["function"]["arguments"]}}}\n{CLOSE}'
        for call in calls
    ]
    return Message.of("assistant", "\n".join(filter(None, (message.get("content"), *blocks))))


def from_text(text: str, with_tools: bool) -> dict[str, Any]:
    """OpenAI's assistant message for what the policy wrote; with tools, its calls are taken out of the text.

    A malformed call becomes one whose arguments are no JSON, so that the environment answers it in its own way.
    """
    # verifiers takes an answer without any text for a failure of the model.
    message: dict[str, Any] = {"role": "assistant", "content": text or " "}
    thought, mark, spoken = text.rpartition(THOUGHT_END)
    before, *blocks = spoken.split(OPEN) if with_tools else (spoken,)
    if blocks:
        calls = [_call(OPEN + block, number) for number, block in enumerate(blocks[:MAX_CALLS])]
        message |= {"content": (thought + mark + before).strip() or None, "tool_calls": calls}
    return message


def _call(block: str, number: int) -> dict[str, Any]:
    try:
        call = parse_tool_call(block)
        name, arguments = (call.name, json.dumps(call.arguments)) if call is not None else ("", f"malformed: {block}")
    except ToolCallError as error:
        name, arguments = "", f"malformed: {error}"
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
