"""Bodies of Anthropic's Messages API, and of a chat, with all that agents send."""

from __future__ import annotations

from typing import Any

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
AGENT: dict[str, Any] = {
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
