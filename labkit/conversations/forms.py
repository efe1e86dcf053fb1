"""A row of anybody's data set as a conversation of the chat API, or the kind of what is wrong with it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.errors import LabError

Messages = list[dict[str, Any]]
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
COLUMNS = {  # what a column may be called where no preset says it; the first that is there counts
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "instruction", "question"),
    "answer": ("completion", "response", "answer", "output"),
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
    "category": ("category", "source"),
}
THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>(.*)", re.DOTALL)  # some begin within the thought
SURROGATES = re.compile("[\ud800-\udfff]")


class BadRow(LabError):
    """A row cannot be used; rows of the same `kind` are counted together."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


@dataclass(frozen=True)
class Conversation:
    """Messages in one form (content always a string; `reasoning`, `tool_calls` where there are) and its tools."""

    messages: Messages
    tools: list[dict[str, Any]]
    category: str = ""


def conversation(value: Any, columns: Mapping[str, str] | None = None) -> Conversation:
    """A row understood: text, or a mapping with messages, ShareGPT turns, or a prompt with or without an answer.

    `columns` names a preset's own columns (the keys of COLUMNS). Raises BadRow.
    """
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping):
        raise BadRow("no conversation", f"a row is {type(value).__name__}")
    row = {name: field_of(fields, name, columns) for name in COLUMNS}
    messages = [message(turn) for turn in turns(row)]
    if row["system"] and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": text(row["system"])})
    refuse_disorder(messages)
    return Conversation(messages, tools_of(row["tools"]), text(str(row["category"] or "")))


def field_of(fields: Mapping[str, Any], name: str, columns: Mapping[str, str] | None) -> Any:
    """The value of a column by the preset's name or by one of the usual ones; None where there is none."""
    names = (columns[name],) if columns and name in columns else COLUMNS[name]
    return next((fields[column] for column in names if fields.get(column) is not None), None)


def turns(row: Mapping[str, Any]) -> list[Any]:
    """The turns of a row, not yet understood."""
    if row["messages"] is not None:
        return listed(row["messages"])
    if row["prompt"] is None:
        raise BadRow("no conversation", "no messages, conversations or prompt")
    found = listed(row["prompt"], "user")
    return found + (listed(row["answer"], "assistant") if row["answer"] is not None else [])


def listed(value: Any, role: str = "") -> list[Any]:
    """Turns from a list, from JSON text of one, or from plain text as the one turn of `role`."""
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if isinstance(value, str):
        value = parsed(value, "no conversation")
    if not isinstance(value, (list, tuple)):
        raise BadRow("no conversation", f"turns are {type(value).__name__}")
    return list(value)


def parsed(value: str, kind: str) -> Any:
    """JSON text as a value; raises BadRow of `kind`."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(kind, f"{value[:40]!r} is no JSON") from error


def message(turn: Any) -> dict[str, Any]:
    """One turn in the chat API's form; raises BadRow for an unknown role or a content that is no text."""
    turn = without_none(turn) if isinstance(turn, Mapping) else {}
    said = str(turn.get("role", turn.get("from", "")))
    role = ROLES.get(said.lower())
    if role is None:
        raise BadRow("unknown role", repr(said))
    if said == "function_call":
        calls = parsed(text(turn.get("value", "")), "broken tool call")
        turn = {"content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    said = turn.get("content", turn.get("value", ""))
    if role == "tool" and isinstance(said, Mapping):
        said = json.dumps(said, ensure_ascii=False, default=str)
    found = {"role": role, "content": text(said)}
    if role == "assistant":
        found |= thought(found["content"], turn)
        if turn.get("tool_calls"):
            calls = turn["tool_calls"] if isinstance(turn["tool_calls"], list) else [turn["tool_calls"]]
            found["tool_calls"] = [tool_call(call, number) for number, call in enumerate(calls)]
    found |= {name: text(str(turn[name])) for name in ("tool_call_id", "name") if role == "tool" and name in turn}
    if not (found["content"].strip() or role == "tool" or found.get("tool_calls") or found.get("reasoning")):
        raise BadRow("empty turn", role)
    return found


def without_none(value: Any) -> Any:
    """The value without the None that Arrow puts where other rows have a key (they would be rendered)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def text(content: Any) -> str:
    """Content as text; parts of text are put together, pictures and the like raise BadRow."""
    if isinstance(content, str):
        if SURROGATES.search(content):  # neither tokenizers nor files take them
            raise BadRow("broken characters", ascii(content[:40]))
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return text("".join(str(part["text"]) for part in content))
    parts = content if isinstance(content, list) else []
    kinds = {str(part.get("type")) for part in parts if isinstance(part, Mapping)}
    raise BadRow("not text", ", ".join(sorted(kinds)) or type(content).__name__)


def thought(content: str, turn: Mapping[str, Any]) -> dict[str, str]:
    """Content and reasoning of an answer: from `reasoning`, `reasoning_content`, or think tags in the content."""
    reasoning = turn.get("reasoning") or turn.get("reasoning_content")
    inline = THOUGHT.fullmatch(content)
    if not reasoning and inline:
        reasoning, content = inline[1], inline[2].lstrip("\n")
    reasoning = text(reasoning).strip("\n") if reasoning else ""
    return {"content": content} | ({"reasoning": reasoning} if reasoning.strip() else {})


def tool_call(call: Any, number: int) -> dict[str, Any]:
    """A tool call of the chat API, its arguments as JSON text; raises BadRow for one without a name."""
    call = call if isinstance(call, Mapping) else {}
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not function.get("name"):
        raise BadRow("broken tool call", str(call)[:60])
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, default=str)
    arguments = text(arguments)
    if not isinstance(parsed(arguments or "{}", "broken tool call"), dict):
        raise BadRow("broken tool call", f"arguments {arguments[:40]}")
    function = {"name": text(str(function["name"])), "arguments": arguments or "{}"}
    return {"id": text(str(call.get("id", f"call_{number}"))), "type": "function", "function": function}


def tools_of(value: Any) -> list[dict[str, Any]]:
    """The tools that a conversation may use, as JSON schemas, from a list or JSON text of one."""
    value = parsed(value, "broken tools") if isinstance(value, str) and value.strip() else value
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadRow("broken tools", str(value)[:60])
    text(json.dumps(value, ensure_ascii=False, default=str))
    return [without_none(tool if "function" in tool else {"type": "function", "function": tool}) for tool in value]


def refuse_disorder(messages: Messages) -> None:
    """Raise BadRow unless user and answers take turns, system stands first and tool results follow calls."""
    roles = [turn["role"] for turn in messages if turn["role"] != "system"]
    if "user" not in roles:
        raise BadRow("no user turn")
    if roles[0] != "user":
        raise BadRow("begins with an answer", roles[0])
    if any(turn["role"] == "system" for turn in messages[1:]):
        raise BadRow("system turn in the middle")
    for before, after in itertools.pairwise(roles):
        if before == after and before != "tool":
            raise BadRow("two turns of one role", before)
        if (before, after) in {("user", "tool"), ("tool", "user")}:
            raise BadRow("tool result out of place", f"{after} after {before}")


class Report:
    """Counts rows by what was wrong with them (left out) or worth knowing (kept), with the first of each."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, bool], dict[str, Any]] = {}

    def add(self, kind: str, where: str, *, kept: bool = False) -> None:
        """Count one row."""
        entry = self.kinds.setdefault((kind, kept), {"kind": kind, "kept": kept, "rows": 0, "first": where[:160]})
        entry["rows"] += 1

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The counts, most frequent first: plain values, which a frame's attrs can hold."""
        return sorted(self.kinds.values(), key=lambda entry: (entry["kept"], -entry["rows"], entry["kind"]))

    def commonest(self) -> str:
        """The most frequent reason with its first row, in words."""
        return f"{self.rows[0]['kind']} ({self.rows[0]['first']})" if self.kinds else "no rows"
