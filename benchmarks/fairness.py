r"""Time to first token of short requests during the prefill of a long prompt.

    python benchmarks/fairness.py -m smollm2.gguf --json out.json

A server with nine slots gets a prompt of about 4,000 tokens, and half a second later eight short
questions at once. Decoding is greedy, without drafts. More `--threads` than cores simulate a
machine that is busy with other programs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from benchmarks.answers import parser_of, running, write_json
from benchmarks.server import Contender, ask

_N_SHORT = 8
_PORT = 18490
#: The long prompt has half as many words, each of several tokens.
_WORDS_OF_LONG = 3_000


def main() -> None:
    parser = parser_of(__doc__, max_tokens=8, ctx_size=6144)
    parser.add_argument("--threads", default="2")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "specgen", "serve", "-m", str(arguments.target), "-md", "none"]
    command += [
        "-q",
        "--prefix-store",
        "off",
        "--parallel",
        str(1 + _N_SHORT),
        "-c",
        str(arguments.ctx_size),
    ]
    command += ["--port", str(_PORT), "-t", arguments.threads]
    contender = Contender("specgen", tuple(command), _PORT)
    words = " ".join(f"word{n * 7919 % 1000}" for n in range(_WORDS_OF_LONG // 2))
    questions = [f"{n}: what is a fox?" for n in range(_N_SHORT)]
    with (
        running(contender.command, contender.url),
        httpx.Client(base_url=contender.url, timeout=900) as client,
        ThreadPoolExecutor(1 + _N_SHORT) as users,
    ):
        ask(client, "Hello", 2)
        long_answer = users.submit(ask, client, words, arguments.max_tokens)
        time.sleep(0.5)
        short_answers = users.map(lambda text: ask(client, text, 8), questions)
        short_first_s = sorted(each.first_s for each in short_answers)
        figures = {
            "short_first_s": [round(seconds, 2) for seconds in short_first_s],
            "short_median_s": round(statistics.median(short_first_s), 2),
            "long_first_s": round(long_answer.result().first_s, 2),
        }
    print(json.dumps(figures))
    write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
