"""Examples of each command, which its help ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: By a command's own name, which no other has.
EXAMPLES: Mapping[str, Sequence[str]] = {
    "run": (
        'specgen run "Why is the sky blue?"',
        'specgen run -hf Qwen/Qwen2.5-Coder-7B-Instruct-GGUF "Tell a story"',
        'git diff | specgen run -m coder.gguf "Review this change"',
    ),
    "chat": (
        'specgen chat -m model.gguf --system "Be brief." --file notes.txt',
        "specgen chat -m model.gguf --session work",
    ),
    "fim": (
        "specgen fim src/shapes.py:120:9 -m coder.gguf --in-place",
        "specgen fim --prefix-file before --suffix-file after -m coder.gguf",
    ),
    "batch": ("specgen batch questions.jsonl answers.jsonl -m model.gguf --parallel 8",),
    "serve": (
        "specgen serve -m model.gguf --port 8081 --parallel 2",
        "specgen serve -m model.gguf --host 0.0.0.0 --api-key-file keys.txt",
    ),
    "verify": ("specgen verify -m model.gguf -md small.gguf",),
    "tune": ("specgen tune -m model.gguf -md small.gguf",),
    "bench": (
        'specgen bench -m model.gguf "Write a sort function" "Explain gravity"',
        "specgen bench -m model.gguf -md small.gguf --prompts mine.jsonl --html report.html",
    ),
    "config": ("specgen config -m model.gguf",),
    "worker": (
        "specgen worker --host 0.0.0.0 --insecure-network",
        "specgen run -m model.gguf --rpc 192.0.2.7:50052 Hello",
    ),
    "doctor": ("specgen doctor -m model.gguf",),
    "list": ("specgen models list --json",),
    "show": ("specgen models show qwen2.5-coder-1.5b",),
    "pull": ("specgen models pull Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",),
    "path": ("ls -l $(specgen models path qwen2.5-coder-1.5b)",),
    "rm": ("specgen models rm Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",),
    "find": ("specgen draft find -m model.gguf small.gguf smaller.gguf --save",),
    "make": (
        "specgen draft make -m model.gguf --minutes 60",
        "specgen draft make -m model.gguf --kind distilled -md small.gguf",
    ),
    "data": ("specgen draft data -m model.gguf --tokens 80000",),
    "learn": ("specgen draft learn -m model.gguf --minutes 30",),
    "forget": ("specgen draft forget -m model.gguf",),
}
