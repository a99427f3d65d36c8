r"""Record an agent's requests: a server that writes each one to a file and answers "Done.".

    python -m benchmarks.record_requests FOLDER --port 8099
    ANTHROPIC_BASE_URL=http://127.0.0.1:8099 claude -p "What is in this folder?"

Requests for answers are written to FOLDER/001.json, FOLDER/002.json and so on, each as an object
with `path` and `body`. `benchmarks/prefixes.py` replays them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_ANSWER = "Done."
Json = dict[str, Any]


def _messages(*, streams: bool) -> Iterator[Json]:
    """An answer in the format of Anthropic's Messages API."""
    usage = {"input_tokens": 1, "output_tokens": 1}
    text = {"type": "text", "text": _ANSWER}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "recorder",
        "content": [text],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": usage,
    }
    if not streams:
        yield message
        return
    yield {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
    yield {"type": "content_block_start", "index": 0, "content_block": {**text, "text": ""}}
    delta = {"type": "text_delta", "text": _ANSWER}
    yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    yield {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}
    yield {"type": "message_stop"}


def _responses(*, streams: bool) -> Iterator[Json]:
    """An answer in the format of OpenAI's Responses API."""
    content = [{"type": "output_text", "text": _ANSWER, "annotations": []}]
    item = {"type": "message", "id": "m1", "role": "assistant", "content": content}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    response: Json = {"id": "r1", "object": "response", "status": "completed", "output": [item]}
    response["usage"] = usage
    if not streams:
        yield response
        return
    yield {"type": "response.created", "response": {**response, "output": []}}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    yield {"type": "response.completed", "response": response}


def _chat(*, streams: bool) -> Iterator[Json]:
    """An answer in the format of OpenAI's chat completions."""
    message = {"role": "assistant", "content": _ANSWER}
    part = "delta" if streams else "message"
    yield {
        "id": "c1",
        "object": "chat.completion.chunk" if streams else "chat.completion",
        "created": 1,
        "model": "recorder",
        "choices": [{"index": 0, part: message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


_ANSWERS = {"/messages": _messages, "/responses": _responses, "/chat/completions": _chat}


class _Recorder(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    def __init__(
        self,
        folder: Path,
        numbers: Iterator[int],
        *args: Any,
    ) -> None:
        self._folder = folder
        self._numbers = numbers
        super().__init__(*args)

    def do_GET(self) -> None:
        models = [{"id": "recorder", "object": "model"}]
        self._send(json.dumps({"object": "list", "data": models}).encode(), "application/json")

    def do_HEAD(self) -> None:
        self._send(b"", "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        path = urlsplit(self.path).path
        answer = next((make for end, make in _ANSWERS.items() if path.endswith(end)), None)
        if answer is None:  # another endpoint, such as the count of tokens
            self._send(b'{"input_tokens": 1}', "application/json")
            return
        file = self._folder / f"{next(self._numbers):03}.json"
        file.write_text(json.dumps({"path": path, "body": body}, indent=1, ensure_ascii=False))
        print(file, path, len(json.dumps(body)), flush=True)
        streams = bool(body.get("stream"))
        events = list(answer(streams=streams))
        if not streams:
            self._send(json.dumps(events[0]).encode(), "application/json")
            return
        lines = [self._line_of(event) for event in events]
        if answer is _chat:
            lines.append("data: [DONE]\n\n")
        self._send("".join(lines).encode(), "text/event-stream")

    @staticmethod
    def _line_of(event: Json) -> str:
        name = f"event: {event['type']}\n" if "type" in event else ""
        return f"{name}data: {json.dumps(event)}\n\n"

    def _send(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Do not log requests: `do_POST` prints the recorded ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write the requests")
    parser.add_argument("--port", type=int, default=8099)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    handler = partial(_Recorder, arguments.folder, itertools.count(1))
    ThreadingHTTPServer(("127.0.0.1", arguments.port), handler).serve_forever()


if __name__ == "__main__":
    main()
