"""OpenAI's responses API, without state: a request is read as a chat, and its answer becomes items and events."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from rl_vlm.http.replies import Content, ReplyForm
from rl_vlm.http.schema import ChatRequest
from rl_vlm.types import Completion, Sample, SampleChunk, StopReason

Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class ResponsesRequest(ChatRequest):
    """OpenAI's request for a response, which is read as a chat: `input` and `instructions` in place of `messages`,
    `text.format` of `response_format`, `max_output_tokens` of `max_completion_tokens`. `n` is 1, and nothing is stored.
    """

    # Comes back with the response.
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = Field(
        {}, max_length=16
    )

    @model_validator(mode="before")
    @classmethod
    def _as_chat(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "input" not in data:
            raise ValueError("the input is missing")
        chat = {name: value for name, value in data.items() if name not in ("input", "instructions", "text")}
        asked, text, choice = data["input"], data.get("text") or {}, data.get("tool_choice")
        items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        instructions = [{"role": "system", "content": data["instructions"]}] if data.get("instructions") else []
        chat["messages"] = [*instructions, *_messages(items)]
        if "max_output_tokens" in chat:
            chat["max_completion_tokens"] = chat.pop("max_output_tokens")
        if isinstance(text, dict) and isinstance(form := text.get("format"), dict):
            named = form.get("type") == "json_schema"
            chat["response_format"] = {"type": form.get("type"), "json_schema": form} if named else form
        if isinstance(tools := data.get("tools"), list):
            chat["tools"] = [_nested(tool) for tool in tools]
        if isinstance(choice, dict) and isinstance(choice.get("name"), str):
            chat["tool_choice"] = _nested(choice)
        elif isinstance(choice, dict) and isinstance(allowed := choice.get("tools"), list):
            some = {"mode": choice.get("mode"), "tools": [_nested(tool) for tool in allowed]}
            chat["tool_choice"] = {"type": choice.get("type"), "allowed_tools": some}
        chat["logprobs"] = bool(chat.get("top_logprobs")) or "message.output_text.logprobs" in (
            data.get("include") or ()
        )
        return chat

    @model_validator(mode="after")
    def _of_one_sample(self) -> ResponsesRequest:
        if self.n != 1:
            raise ValueError("a response has one sample: leave n out")
        return self


def _nested(tool: Any) -> Any:
    """A tool as a chat has it."""
    if not isinstance(tool, dict):
        return tool
    return {"type": tool.get("type"), "function": {name: value for name, value in tool.items() if name != "type"}}


def _messages(items: Any) -> Iterator[dict[str, Any]]:
    """The messages of a chat; calls and thoughts belong to the assistant's message that they stand beside."""
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError("the input must be text, or a list of items")
    said: dict[str, Any] | None = None
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            message = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        elif kind == "message" and item.get("role") != "assistant":
            message = {"role": item.get("role"), "content": item.get("content")}
        elif kind in ("message", "function_call", "reasoning"):
            if said is None or (kind == "message" and said["content"] is not None):
                if said is not None:
                    yield said
                said = {"role": "assistant", "content": None, "tool_calls": []}
            if kind == "message":
                said["content"] = item.get("content")
            elif kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                said["tool_calls"].append({"id": item.get("call_id", ""), "type": "function", "function": function})
            else:
                parts = item.get("content") or item.get("summary") or ()
                said["reasoning"] = "".join(part["text"] for part in parts if isinstance(part, dict) and "text" in part)
            continue
        else:
            raise ValueError(f"an item of the type {str(kind)[:40]!r} is not known here: this server keeps no state")
        if said is not None:
            yield said
        said = None
        yield message
    if said is not None:
        yield said


class ResponseReply(ReplyForm):
    """A `response`, whole or as its events."""

    says_done = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._numbers = itertools.count()
        self._items: list[Content] = []
        self._open = False  # whether the last item may still grow
        self._status, self._version = "in_progress", 0

    def whole(self, completions: Sequence[Completion]) -> Content:
        self._version = completions[0].policy_version
        self._grown(completions[0].samples[0], last=True)
        return self._response()

    def chunk(self, new: SampleChunk) -> list[Content]:
        self._version = new.policy_version
        begun = [] if self._samples[0].token_ids else [self._status_event("created"), self._status_event("in_progress")]
        return begun + self._grown(new, last=new.stop_reason is not None)

    def end(self, version: int) -> list[Content]:
        return [self._status_event(self._status)]

    def _status_event(self, what: str) -> Content:
        return self._event(what, response=self._response())

    def _grown(self, new: Sample | SampleChunk, last: bool) -> list[Content]:
        """The events for new tokens; with them the items grow."""
        sample, text, places = self._grow(0, new, last)
        grown = sample.answer.feed(text, last)
        logprobs = [self._token_of(sample, place) for place in places] if self._body.top is not None else []
        events: list[Content] = []
        if thought := grown.get("reasoning"):
            events += self._more("reasoning", thought)
        if (said := grown.get("content", "")) or (last and not self._items and "tool_calls" not in grown):
            events += self._more("message", said, logprobs=logprobs)
        for call in grown.get("tool_calls", ()):
            events += self._more("function_call", call["function"]["arguments"], call)
        if last:
            self._status = "incomplete" if new.stop_reason is StopReason.LENGTH else "completed"
            events += self._close()
        return events

    def _more(
        self, kind: str, text: str, call: Mapping[str, Any] | None = None, logprobs: Sequence[Content] = ()
    ) -> list[Content]:
        """Let the last item grow, or a new one begin."""
        events: list[Content] = []
        if not self._open or self._items[-1]["type"] != kind or (call is not None and "id" in call):
            events = [*self._close(), *self._begin(kind, call)]
        item = self._items[-1]
        grows, key = (item, "arguments") if call is not None else (item["content"][0], "text")
        grows[key] += text
        if kind != "message":
            return [*events, self._at(f"{_GROWS[kind]}.delta", delta=text)]
        grows["logprobs"] += logprobs
        return [*events, self._at("output_text.delta", delta=text, logprobs=list(logprobs))]

    def _begin(self, kind: str, call: Mapping[str, Any] | None) -> list[Content]:
        item: Content = {"id": f"{kind}-{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if call is not None:
            item |= {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
        else:
            item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self._items.append(item)
        self._open = True
        events = [self._event("output_item.added", output_index=len(self._items) - 1, item=_copied(item))]
        if call is None:
            part = {"type": _GROWS[kind], "text": ""}
            item["content"] = [part | ({"annotations": [], "logprobs": []} if kind == "message" else {})]
            events.append(self._at("content_part.added", part=dict(item["content"][0])))
        return events

    def _close(self) -> list[Content]:
        if not self._open:
            return []
        item, self._open = self._items[-1], False
        item["status"] = "incomplete" if self._status == "incomplete" else "completed"
        (part,) = item.get("content", [item])
        done = {key: part[key] for key in ("text", "logprobs", "name", "arguments") if key in part}
        events = [self._at(f"{_GROWS[item['type']]}.done", **done)]
        if part is not item:
            events.append(self._at("content_part.done", part=dict(part)))
        return [*events, self._event("output_item.done", output_index=len(self._items) - 1, item=_copied(item))]

    def _event(self, kind: str, **fields: Any) -> Content:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}

    def _at(self, kind: str, **fields: Any) -> Content:
        """An event about the last item."""
        item = self._items[-1]
        where = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **where, **({"content_index": 0} if "content" in item else {}), **fields)

    def _response(self) -> Content:
        body, usage, choice = self._body, self._usage(), self._body.tool_choice
        counted = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        content = self._content("response", self._version, [], counted if self._status != "in_progress" else None)
        del content["choices"]
        return content | {
            "created_at": content.pop("created"),
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "error": None,
            "output": [_copied(item) for item in self._items],
            "max_output_tokens": body.max_new_tokens,
            "tools": [{"type": "function", **tool.function.model_dump()} for tool in body.tools],
            "tool_choice": {"type": "function", "name": body.named_tool} if body.named_tool else choice,
            "instructions": None,
            "metadata": body.metadata,
            "store": False,
            **{name: getattr(body, name) for name in ("temperature", "top_p", "parallel_tool_calls")},
        }


# What grows in an item of each type.
_GROWS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


def _copied(item: Content) -> Content:
    """As it is now: it goes on to grow."""
    return item | ({"content": [dict(part) for part in item["content"]]} if "content" in item else {})
