"""Request bodies as agents send them in each API, and answers in the format of an API."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from specgen.events import CommittedEvent, FinishedEvent, Piece, ReasonCount
from specgen.serve.formats.answer_writer import AnswerContext
from specgen.serve.formats.fields import Json
from specgen.serve.formats.parsed_request import ParsedRequest

FINISHED = FinishedEvent(
    sequence=0,
    time_s=2.0,
    text="é b",
    token_ids=(1, 2),
    finish_reason="stop",
    stopped_by="</s>",
    n_prompt_tokens=12,
    n_cached_tokens=8,
    n_tokens=2,
    n_rounds=2,
    n_drafted=4,
    n_accepted=1,
    acceptance_rate=0.25,
    mean_accepted_length=1.5,
    accepted_by_depth=(1,),
    drafted_by_depth=(4,),
    tokens_per_s=2.5,
    time_to_first_token_s=0.5,
    prompt_s=0.5,
    draft_s=0.25,
    target_s=1.0,
    loop_s=0.25,
    wall_s=1.5,
    undrafted=(
        ReasonCount("nothing found", "nothing found to draft", 3),
        ReasonCount("no room", "no room for a draft", 1),
    ),
)


def context_of(request: ParsedRequest) -> AnswerContext:
    """What a writer of one answer to an empty prompt has to know."""
    return AnswerContext([request], [""], identity="abc", created=17, model="m.gguf")


def written(
    request: ParsedRequest, *tokens: str | Piece, **finished: Any
) -> tuple[list[Json], Json]:
    """The chunks of an answer with these tokens, and the complete answer. Both can be JSON."""
    writer = request.writer(context_of(request))
    chunks = writer.begin(12)
    for token in tokens:
        piece = Piece(1, token, "plain", "target") if isinstance(token, str) else token
        chunks += writer.feed(0, CommittedEvent(0, 0.0, 1, (piece,), piece.text, 3))
    chunks += writer.feed(0, dataclasses.replace(FINISHED, **finished))
    both = chunks, writer.whole()
    assert json.loads(json.dumps(both, allow_nan=False)) == [*both]
    return both


EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
MESSAGES: dict[str, Any] = {
    "model": "any",
    "max_tokens": 4,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "stop_sequences": ["\n\n", "END"],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=0f3;"},
        {"type": "text", "text": "Be short.", **EPHEMERAL},
        {"type": "text", "text": "Use tools."},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Read a.txt", **EPHEMERAL}]},
        {"role": "system", "content": "Agent types: none"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A file.", "signature": ""},
                {"type": "text", "text": "I read it."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.txt"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"path": "b.txt"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "7"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "no file"}],
                    "is_error": True,
                    **EPHEMERAL,
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Reads a file",
            "input_schema": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["path"],
                "propertyNames": {"pattern": "^[a-z]+$"},
                "additionalProperties": False,
            },
        },
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "x"},
}
#: A body of a chat with what agents send in it.
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "You edit files."}]},
        {"role": "user", "content": "Read a.py.", "name": "eva"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "read", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "print(1)"},
    ],
    "tools": [{"type": "function", "function": {"name": "read", "parameters": {}}}],
    "tool_choice": "required",
    "logit_bias": {"5": -1},
    "stop": ["END"],
    "speculative": {"draft": True, "max": 4},
}
#: A request for a response.
RESPONSES: dict[str, Any] = {
    "model": "any",
    "instructions": "Be brief.",
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "You may run commands."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "I look."}],
            "content": [{"type": "reasoning_text", "text": "I have to look."}],
            "encrypted_content": "SSBsb29rLg==",
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "exec_command",
            "arguments": '{"cmd": "cat a.txt"}',
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "b"},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "+b"},
        {
            "type": "custom_tool_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "done"}],
        },
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
        },
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close"}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "exec_command"}, {"type": "web_search"}],
    },
    "parallel_tool_calls": True,
    "reasoning": {"effort": "none", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "chat_template_kwargs": {"enable_thinking": False},
    "max_output_tokens": 4,
    "store": False,
    "truncation": "auto",
    "prompt_cache_key": "key",
    "client_metadata": {"a": "b"},
}
