r"""How long short requests wait for their first token while a long prompt is read.

    python benchmarks/fairness.py -m smollm2.gguf --json out.json

A server of nine slots gets a prompt of some 4,000 tokens, and half a second later eight questions
at once. `--threads` above the machine's cores makes it as busy as with other programs. No drafts,
greedy.
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

_N_SHORT, _PORT, _WORDS_OF_LONG = 8, 18490, 3_000


def main() -> None:
    parser = parser_of(__doc__, max_tokens=8, ctx_size=6144)
    parser.add_argument("--threads", default="2")
    asked = parser.parse_args()
    command = [sys.executable, "-m", "specgen", "serve", "-m", str(asked.target), "-md", "none"]
    command += [
        "-q",
        "--prefix-store",
        "off",
        "--parallel",
        str(1 + _N_SHORT),
        "-c",
        str(asked.ctx_size),
    ]
    command += ["--port", str(_PORT), "-t", asked.threads]
    contender = Contender("specgen", tuple(command), _PORT)
    words = " ".join(f"word{n * 7919 % 1000}" for n in range(_WORDS_OF_LONG // 2))
    shorts = [f"{n}: what is a fox?" for n in range(_N_SHORT)]
    with (
        running(contender.command, contender.url),
        httpx.Client(base_url=contender.url, timeout=900) as client,
        ThreadPoolExecutor(1 + _N_SHORT) as users,
    ):
        ask(client, "Hello", 2)
        long = users.submit(ask, client, words, asked.max_tokens)
        time.sleep(0.5)
        firsts = sorted(
            each.first_s for each in users.map(lambda text: ask(client, text, 8), shorts)
        )
        found = {
            "short_first_s": [round(each, 2) for each in firsts],
            "short_median_s": round(statistics.median(firsts), 2),
            "long_first_s": round(long.result().first_s, 2),
        }
    print(json.dumps(found))
    write_json(asked.json, found)


if __name__ == "__main__":
    main()
