"""What a reader of a stream ends with, to be compared with what was not streamed."""

from __future__ import annotations

from typing import Any


def joined_completion(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices by index."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "logprobs": None})
            whole["text"] += part.pop("text")
            _add_lists(whole, part, ("token_ids", "weight_epochs"))
            scores = part.pop("logprobs")
            if scores is not None:
                whole["logprobs"] = whole["logprobs"] or {name: [] for name in scores}
                for name, values in scores.items():
                    whole["logprobs"][name] += values
            whole.update(part)
    return choices


def joined_chat(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {"message": {"content": None}, "logprobs": None})
            _add_delta(whole["message"], part.pop("delta"))
            _add_lists(whole, part, ("token_ids", "weight_epochs"))
            scores = part.pop("logprobs")
            if scores is not None:
                whole["logprobs"] = whole["logprobs"] or {"content": [], "refusal": None}
                whole["logprobs"]["content"] += scores["content"]
            whole.update(part)
    for whole in choices.values():
        message = whole["message"]
        if message.get("tool_calls") and not message["content"]:
            message["content"] = None
    return choices


def _add_lists(whole: dict[str, Any], part: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if name in part:
            whole[name] = whole.get(name, []) + part.pop(name)


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if name in delta:
            message[name] = (message.get(name) or "") + delta.pop(name)
    for call in delta.pop("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        index = call.pop("index")
        if index == len(calls):
            calls.append(call)
        else:
            calls[index]["function"]["arguments"] += call["function"]["arguments"]
    message.update(delta)
