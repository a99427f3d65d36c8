"""The body of a request for a response, with all kinds of items and tools that agents send."""

from __future__ import annotations

from typing import Any

AGENT_BODY: dict[str, Any] = {
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
