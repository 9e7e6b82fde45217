"""Conversations for models whose template opens a thought: what is trained is a turn as the template itself writes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rl_vlm.chat import ChatCodec
from rl_vlm.envs.data import Row
from rl_vlm.envs.images import decode
from rl_vlm.envs.rows import BadRowError
from rl_vlm.models.images import TextSide
from rl_vlm.supervised.conversations import ConversationEncoder, SFTConversation, read_conversation
from rl_vlm.types import Trajectory

USER = {"role": "user", "content": "How many?"}
# As the templates of Qwen's Thinking models write the assistant's last turn and the next prompt.
TURN = r"""
    {%- elif message.role == 'assistant' %}
        {%- set content = text_only(message.content) %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.last %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
"""


@pytest.fixture(scope="module")
def thinking(text: TextSide) -> TextSide:
    """The tiny model with a template that opens a thought."""
    before, _, rest = text.codec._template.partition("    {%- elif message.role == 'assistant' %}")
    _, calls, after = rest.partition("        {%- for call in message.tool_calls or [] %}")
    template = before.rstrip() + TURN.rstrip("\n") + "\n" + calls + after
    template = template.replace(
        "{{- '<|im_start|>assistant\\n' }}\n{%- endif %}", "{{- '<|im_start|>assistant\\n<think>\\n' }}\n{%- endif %}"
    )
    codec = ChatCodec(text.codec._tokenizer, template, "<|image_pad|>")
    assert codec.opens_thought and not text.codec.opens_thought
    return replace(text, codec=codec)


def encoded(text: TextSide, *messages: dict[str, Any]) -> Trajectory:
    return ConversationEncoder(text, 4096).encode(conversation(*messages)).check()


def conversation(*messages: dict[str, Any]) -> SFTConversation:
    return read_conversation(Row({"messages": list(messages)}, "a.jsonl, line 1", decode))


def said(text: TextSide, trajectory: Trajectory) -> list[str]:
    return [text.codec.decode(trajectory.token_ids[turn.start : turn.stop]) for turn in trajectory.turns]


@pytest.mark.parametrize(
    ("answer", "trained"),
    [
        ({"content": "Two."}, "Two."),
        ({"content": "\n\nTwo."}, "Two."),
        ({"content": "<think>\nOne and one.\n</think>\n\nTwo."}, "One and one.\n</think>\n\nTwo."),
        ({"content": "One and one.</think>Two."}, "One and one.\n</think>\n\nTwo."),
        ({"content": "<think>\n\n</think>\n\nTwo."}, "Two."),
        ({"content": "Two.", "reasoning_content": "One and\n\none."}, "One and\n\none.\n</think>\n\nTwo."),
        ({"content": "Two.", "reasoning_content": None}, "Two."),
    ],
    ids=["plain", "line ends", "own thought", "opened by the prompt", "empty thought", "reasoning_content", "none"],
)
def test_a_turn_is_what_the_template_writes(thinking: TextSide, answer: dict[str, Any], trained: str) -> None:
    messages = [USER, {"role": "assistant", **answer}]
    trajectory = encoded(thinking, *messages)
    tokenizer = thinking.codec._tokenizer
    expected = tokenizer.apply_chat_template(messages, chat_template=thinking.codec._template, tokenize=False)
    assert tokenizer.decode(trajectory.token_ids.tolist()) + "\n" == expected
    assert said(thinking, trajectory) == [trained]
    assert trajectory.token_ids[-1] == thinking.codec.end_of_turn_id and trajectory.loss_mask[-1]


def test_earlier_turns_keep_their_thoughts_as_in_rollouts(thinking: TextSide) -> None:
    one = {"role": "assistant", "content": "One.", "reasoning_content": "I count."}
    two = {"role": "assistant", "content": "Two."}
    trajectory = encoded(thinking, USER, one, USER, two)
    assert said(thinking, trajectory) == ["I count.\n</think>\n\nOne.", "Two."]
    whole = thinking.codec._tokenizer.decode(trajectory.token_ids.tolist())
    assert whole.count("<think>\n") == 2 == whole.count("\n</think>\n\n")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "content": "<think>\nOne and"}, "opens a thought"),
        ({"role": "assistant", "content": "Hm. <think>one</think>Two."}, "text before its thought"),
        ({"role": "assistant", "content": "Two.", "reasoning_content": 2}, "message 1 has a reasoning_content"),
    ],
)
def test_a_thought_that_cannot_be_trained_is_a_bad_row(thinking: TextSide, message: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRowError):
        encoded(thinking, USER, message)
