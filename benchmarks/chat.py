"""Time to first token in a conversation, with the KV cache of earlier turns and without it.

    python benchmarks/chat.py -m 1.5b.gguf -md 135m.gguf --json out.json

A conversation of ten turns, at temperature 0. Each turn is answered twice: by an engine that stays
open, which prefills only what is new, and by a new one without drafts, which prefills the whole
prompt. Both must generate the same text.

Prints a line for each turn: the tokens of the prompt, and how many of them the open engine decoded;
the time to first token of the open and of the new engine; the tokens of the answer; the tokens per
second of the open and of the new engine; and whether the texts are equal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.answers import answer, opened, parser_of, write_json
from specgen.events import FinishedEvent
from specgen.llama.kernels.admission import choose_kernels
from specgen.options import DraftSource
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine
from specgen.session.measurement_store import MeasurementStore
from specgen.session.prompts.template import Message
from specgen.system.folders import cache_folder

QUESTIONS = (
    "Write a Python function that counts the words of a text file.",
    "Let it ignore upper and lower case, and punctuation.",
    "Return the ten most frequent words, with their counts.",
    "What happens with a file that does not exist?",
    "Handle that with a clear message, and show the whole function.",
    "Add type annotations and a docstring.",
    "Write a test for it with pytest.",
    "How does its memory use grow with the size of the file?",
    "Rewrite it so that it reads line by line.",
    "Sum up in three sentences what we changed, and why.",
)


def main() -> None:
    parser = parser_of(__doc__, max_tokens=200, ctx_size=4096)
    parser.add_argument("-md", "--draft", default="none", help="a file, ngram or none")
    arguments = parser.parse_args()
    choose_kernels("auto", cache_folder())
    draft: DraftSource = (
        arguments.draft if arguments.draft in ("ngram", "none") else Path(arguments.draft)
    )
    measurements = MeasurementStore()
    turns: list[dict[str, Any]] = []
    with (
        opened(arguments.target, draft, arguments.max_tokens, measurements) as loaded,
        opened(arguments.target, "none", arguments.max_tokens, measurements) as plain,
        Engine(loaded, n_ctx=arguments.ctx_size) as engine,
    ):
        calibrate(loaded)
        messages: list[Message] = []
        for question in QUESTIONS:
            messages.append(Message("user", question))
            prompt = loaded.prompts.of_messages(messages)
            *_, finished = engine.stream(engine.insert(prompt))
            assert isinstance(finished, FinishedEvent)
            fresh = answer(plain, plain.prompts.of_messages(messages))
            turns.append(
                {
                    "n_prompt": finished.n_prompt_tokens,
                    "n_decoded": finished.n_prompt_tokens - finished.n_cached_tokens,
                    "first_token_s": round(finished.time_to_first_token_s or 0.0, 3),
                    "uncached_first_token_s": round(fresh.time_to_first_token_s or 0.0, 3),
                    "n_answer": finished.n_tokens,
                    "tokens_per_s": round(finished.tokens_per_s or 0.0, 1),
                    "plain_tokens_per_s": round(fresh.tokens_per_s or 0.0, 1),
                    "is_equal": finished.text == fresh.text,
                }
            )
            print(f"turn {len(turns)}: {turns[-1]}", file=sys.stderr)
            messages.append(Message("assistant", finished.text))
    for number, turn in enumerate(turns, start=1):
        print("\t".join(map(str, (number, *turn.values()))))
    about = {"target": arguments.target.name, "draft": Path(arguments.draft).name, "turns": turns}
    write_json(arguments.json, about)


if __name__ == "__main__":
    main()
