"""The pages in docs/benchmarks/, from the raw figures in benchmarks/results/; `make docs` writes them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence

from scripts import benchmark_tables as tables
from scripts import workers_page
from scripts.benchmark_tables import RESULTS, Figures

_CATEGORIES = {
    "reasoning": "reason.",
    "extraction": "extract.",
    "humanities": "human.",
    "translation": "transl.",
    "summarization": "summ.",
    "math_reasoning": "math_r.",
}
#: Rows of a batch that have a column.
_ROWS = ("1", "2", "4", "8", "12", "16", "32", "512")
_FEW_ROWS = ("1", "2", "4", "8", "16", "512")


def pages() -> dict[str, tuple[str, list[str]]]:
    """Title and parts of each page, by the name of its file."""
    return {
        "llama-cpp.md": ("Against llama.cpp's own programs", _llama_cpp()),
        "mtp.md": ("A target's own MTP layer", _mtp()),
        "batches.md": ("What a batch costs", _batches()),
        "several.md": ("Several answers at once", _several()),
        "server.md": ("What users of a server get", _server()),
        "rpc.md": ("A target on workers", workers_page.parts()),
        "adapters.md": ("Drafts in llama-cpp-python's Llama", _adapters()),
        "conversation.md": ("A conversation of ten turns", _conversation()),
        "infill.md": ("Fill-in-the-middle", _infill()),
    }


# --- against llama.cpp's own programs -----------------------------------------------------------


_LLAMA_CPP = ("kernels-bench-q4.json", "kernels-bench-q8.json", "kernels-bench-f16.json")


def _llama_cpp() -> list[str]:
    parts = [
        (
            "`make peers`, then `python -m benchmarks.peers -m TARGET -md SMOLLM2 -md 0.5B --prompts FILE "
            "--count 1`: plain decoding, specgen with its defaults (it starts without measurements "
            "and keeps what it learns from prompt to prompt), and llama.cpp's programs in five usual "
            "settings, built from the same source. They take turns, at temperature 0. The prompts (`python "
            "benchmarks/sample.py SPEC_BENCH > FILE`) are one of each of Spec-Bench's 13 categories and of "
            "two of our own (new code, a code edit). With one prompt each, a category's figure depends much "
            "on chance. llama.cpp refuses SmolLM2 as a draft, so it uses the 0.5B."
        ),
        (
            '"All" and the categories are tokens per second after the first token, relative to plain decoding '
            'of the same prompt with specgen\'s kernels; geometric means. "Whole" compares the time of '
            "whole answers, prompts included. In llama.cpp the draft reads the prompt before the first "
            "token, which its tokens per second do not count; in specgen they do count the time in which "
            "the draft reads the prompt."
        ),
    ]
    for name in (*_LLAMA_CPP, "bench-bigger.json"):
        report = tables.read(name)
        drafts = {c["name"] for c in report["contenders"] if c["drafters"]}
        lineup = [f for f in report["figures"] if not f["is_plain"] and f["speedup"] is not None]
        ours = [figures for figures in lineup if figures["contender"] in drafts]
        theirs = [figures for figures in lineup if figures not in ours]
        parts.append(f"## {tables.model(lineup[0]['target'])}")
        if name not in _LLAMA_CPP:
            parts.append(
                "`python benchmarks/bigger_target.py -m 1.5B --times 5 -o FILE`: the price of a 7B, the text of the "
                "1.5B. Of a round, the target takes 0.79 of the time, 1.4 times a token's, and the draft 0.19. With "
                "rows for nothing it would be 2.6 times plain decoding."
            )
        parts.append(
            f"{report['settings']['generation']['max_tokens']} tokens ({tables.raw(name)})"
        )
        parts.append(_categories_table(ours, theirs))
        parts.append("\n".join(f"- {_compared(figures, theirs)}" for figures in ours))
    return parts


def _categories_table(ours: Sequence[Figures], theirs: Sequence[Figures]) -> str:
    names = list(_by_category(ours[0]))
    best = _best(theirs)
    rows = [["", "all", "whole", "worst", *(_CATEGORIES.get(name, name) for name in names)]]
    for figures in (*ours, *theirs):
        name = figures["contender"]
        own = f"**specgen, {tables.model(name)}**" if figures in ours else name
        shown = (figures["speedup"], figures.get("whole"), (figures["worst"] or {}).get("speedup"))
        by_category = _by_category(figures)
        rows.append(
            [own, *map(tables.number, shown), *(tables.number(by_category.get(n)) for n in names)]
        )
    of_all = tables.number(statistics.geometric_mean(best.values()))
    rows.append(
        ["the best of llama.cpp's, by category", of_all, "", "", *map(tables.number, best.values())]
    )
    return tables.table(rows)


def _compared(ours: Figures, theirs: Sequence[Figures]) -> str:
    setting = max(theirs, key=lambda figures: figures["speedup"])
    own_time = 100 * (ours["shares"] or {}).get("own", 0.0)
    return (
        f"specgen, {tables.model(ours['contender'])}: {ours['speedup'] / setting['speedup']:.2f} times "
        f"{setting['contender']}, own time {own_time:.1f} %, acceptance rate "
        f"{tables.number(ours['acceptance_rate'])}, {tables.number(ours['mean_accepted_length'])} tokens a round, "
        f"{ours['n_answers'] - ours['n_different']} of {ours['n_answers']} texts equal plain decoding's"
    )


def _by_category(figures: Figures) -> dict[str, float]:
    return {
        category["category"]: category["speedup"]
        for category in figures["categories"]
        if category["speedup"] is not None
    }


def _best(theirs: Sequence[Figures]) -> dict[str, float]:
    """The best of each category, by whoever that is."""
    best: dict[str, float] = {}
    for figures in theirs:
        for name, speedup in _by_category(figures).items():
            best[name] = max(speedup, best.get(name, 0.0))
    return best


# --- MTP layers ---------------------------------------------------------------------------------

_MTP = {
    "mtp-by-heart.json": "by heart, as makers ship them",
    "mtp-bigger.json": "by heart, a target of five times the cost",
    "mtp-honest.json": "trained on 34 thousand tokens of the target's answers",
    "mtp-untrained.json": "not trained",
}


def _mtp() -> list[str]:
    categories = ("code", "edit", "prose", "chat")
    rows = [["layer", "", "all", "whole", "worst", *categories, "tokens a round", "texts equal"]]
    for name, layer in _MTP.items():
        shown = f"{layer} ({tables.raw(name)})"
        for figures in tables.read(name)["figures"]:
            if figures["is_plain"]:
                continue
            contender = figures["contender"]
            by_category = _by_category(figures)
            worst = (figures["worst"] or {}).get("speedup")
            n_equal = figures["n_answers"] - figures["n_different"]
            is_peer = contender.startswith("llama.cpp")
            rows.append(
                [
                    shown,
                    contender if is_peer else f"**specgen, {tables.model(contender)}**",
                    *map(tables.number, (figures["speedup"], figures.get("whole"), worst)),
                    *(tables.number(by_category.get(each)) for each in categories),
                    "" if is_peer else tables.number(figures["mean_accepted_length"]),
                    f"{n_equal} of {figures['n_answers']}",
                ]
            )
            shown = ""
    return [
        (
            "No file with a trained MTP layer that runs on such a machine was at hand. `python benchmarks/mtp_target.py` "
            "writes the 1.5B Q4_K_M in GLM-4.5's form, with the same text, and trains a layer for it. The stand-in for "
            "what makers ship learnt the answers of the benchmark's own prompts **by heart**, until it was right at "
            "0.88, 0.80 and 0.75 of the places 1, 2 and 3 tokens ahead: the costs are real, the acceptance is set. The "
            "other layers know nothing of the answers. `benchmarks/bigger_target.py` writes a target of five times the "
            "cost."
        ),
        (
            "`specgen bench -m FILE -md mtp`, for the first with llama.cpp's programs beside it: the benchmark's own 16 prompts (8 "
            "for the untrained layer), 96 tokens (64 for the larger target), at temperature 0, by turns. Tokens per second "
            "after the first token, relative to plain decoding with specgen's kernels; geometric means. `mtp n` is "
            "llama.cpp's `--spec-type draft-mtp --spec-draft-n-max n`. N-grams draft beside the layer."
        ),
        tables.table(rows),
    ]


# --- batches ------------------------------------------------------------------------------------


def _batches() -> list[str]:
    return [
        (
            "`python benchmarks/costs.py MODEL... --turns 1` "
            f"({tables.raw('kernels.jsonl')}): milliseconds for a batch of n rows, 200 tokens in context, two "
            "threads; llama.cpp's own code and specgen's kernels take turns, each in its own process."
        ),
        tables.table(_costs("kernels.jsonl", _ROWS)),
        "## Mixtures of experts",
        (
            "`python benchmarks/random_models.py SHAPE ...`, then `python benchmarks/costs.py MODEL... --turns 2` "
            f"({tables.raw('experts.jsonl')}), Zen 5: random weights in the shapes of models that people run, with 4 to 12 "
            "of their layers. How many experts the rows of a batch share depends on the router, and here routers are random."
        ),
        tables.table(_costs("experts.jsonl", _FEW_ROWS)),
        "## Types of weights",
        (
            "`python benchmarks/random_models.py dense ... --type TYPE`, then `costs.py --turns 3` "
            f"({tables.raw('weight-types.jsonl')}), Zen 5: how many times as fast as llama.cpp's own code the kernels "
            "compute a batch, for a dense model of one type of weights (four layers of the 1.5B's size)."
        ),
        tables.table(_times_as_fast("weight-types.jsonl")),
        "## Long contexts",
        (
            "`python benchmarks/costs.py MODEL... --contexts 4000 16000 --turns 1` "
            f"({tables.raw('long-contexts.jsonl')}), Zen 5. The last columns are the seconds that reading the context took, "
            "and the memory of the process without the file's pages."
        ),
        tables.table(_long_contexts()),
    ]


def _costs(name: str, sizes: Sequence[str]) -> list[list[str]]:
    """Milliseconds by rows, from what benchmarks/costs.py printed."""
    rows = [["model", "code", *sizes]]
    named = ""
    for entry in _lines(name):
        model = entry["model"]
        times = [tables.ms(entry["ms"][n]) for n in sizes]
        rows.append(["" if model == named else model, entry["kernels"], *times])
        if entry["kernels"] == "specgen":
            ratios = [tables.number(entry["ms"][n] / entry["ms"]["1"]) for n in sizes[1:]]
            rows.append(["", "ratio to one row", "", *ratios])
        named = model
    return rows


def _times_as_fast(name: str) -> list[list[str]]:
    found = [entry for entry in _lines(name) if "times_as_fast" in entry]
    rows = [
        [entry["model"], *(tables.number(entry["times_as_fast"][n]) for n in _FEW_ROWS)]
        for entry in found
    ]
    return [["type", *_FEW_ROWS], *rows]


def _long_contexts() -> list[list[str]]:
    rows = [["model", "tokens", "code", *_FEW_ROWS[:-1], "context, s", "memory, MiB"]]
    for entry in _lines("long-contexts.jsonl"):
        times = [tables.ms(entry["ms"][n]) for n in _FEW_ROWS[:-1]]
        whole = [f"{entry['context_s']:.0f}", f"{entry['anonymous_mib']:.0f}"]
        rows.append([entry["model"], f"{entry['context']}", entry["kernels"], *times, *whole])
    return rows


def _lines(name: str) -> list[Figures]:
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# --- several answers ----------------------------------------------------------------------------


def _several() -> list[str]:
    parts = [
        "## In one engine",
        (
            "`python benchmarks/several.py -m TARGET -md SMOLLM2 --prompts FILE -N 12`: 12 answers of 45 "
            "tokens on average, 1 to 8 at once, without the time of the prompts. Tokens per second in all, "
            "relative to one answer after the other without drafts; geometric means of two turns."
        ),
        tables.table([["target", "drafts", "1", "2", "4", "8 at once", ""], *_several_rows()]),
    ]
    if (RESULTS / "batch-15.json").exists():
        parts += [
            "## Batches, prompts included",
            (
                "`python benchmarks/batch.py -m TARGET -md SMOLLM2 --prompts FILE --server llama-server`: "
                f"{tables.read('batch-15.json')['n_prompts']} prompts of all categories, 64 tokens each, `specgen "
                "batch`'s parts, and llama.cpp's server of the same source with as many slots and clients. "
                "Tokens per second in all; reading the prompts, some of them long, takes more than half of the time."
            ),
            tables.table([["target", "", "1", "2", "4", "8 at once", ""], *_batch_rows()]),
        ]
    return parts


def _server() -> list[str]:
    parts = [
        (
            "`python benchmarks/server.py -m TARGET -md SMOLLM2 -md ngram --peer llama-server --peer-draft 0.5B "
            "--prompts FILE -N 12`: 12 prompts of all categories, 64 tokens each, greedy, streamed, asked by 1, 2, "
            "4 and 8 users at a time of servers with eight slots each; `llama-server` is built from the same source. "
            "Tokens per second in all include the prompts; those of a user count from the first token on (median). "
            "The last column counts texts that equal those of `specgen serve` without drafts for one user."
        )
    ]
    for name in ("server-15.json",):
        report = tables.read(name)
        parts.append(f"## {tables.model(report['target'])} ({tables.raw(name)})")
        head = ["users", "server", "tokens/s in all", "of a user", "first token, median"]
        rows = [[*head, "first token, 95 %", "texts equal"]]
        before = 0
        for run in report["runs"]:
            n_users = str(run["n_users"]) if run["n_users"] != before else ""
            before = run["n_users"]
            rows.append(
                [
                    n_users,
                    _contender(run["contender"]),
                    f"{run['tokens_per_s']:.1f}",
                    f"{run['tokens_per_s_of_a_user']:.1f}",
                    f"{run['first_token_s']:.2f} s",
                    f"{run['first_token_high_s']:.2f} s",
                    f"{run['n_equal']} of {report['n_prompts']}",
                ]
            )
        parts.append(tables.table(rows))
    return parts


def _adapters() -> list[str]:
    report = tables.read("adapters.json")
    rows = [["draft", "whole answers", "after the first token", "acceptance rate", "texts equal"]]
    for way in report["ways"]:
        turns = way["turns"]
        n_drafted = sum(turn.get("n_drafted", 0) for turn in turns)
        n_accepted = sum(turn.get("n_accepted", 0) for turn in turns)
        name = way["way"]
        rows.append(
            [
                {"Llama": "none"}.get(
                    name, f"`{name}`" if name[:1].isupper() else tables.model(name)
                ),
                tables.number(way["ratio"]),
                tables.number(way["ratio_behind_first"]),
                tables.number(n_accepted / n_drafted if n_drafted else None),
                f"{min(turn['n_equal'] for turn in turns)} of {report['n_prompts']}",
            ]
        )
    return [
        (
            "`python benchmarks/adapters.py -m TARGET -md SMOLLM2 -md 0.5B --prompts FILE -N 8 -n 96 --turns 1` "
            f"({tables.raw('adapters.json')}): {tables.model(report['target'])} in `Llama` with flash attention and specgen's "
            "kernels in all rows. Speeds are relative to `Llama` without a draft. With any draft, `Llama` computes "
            "the logits of all tokens of a prompt, so that the first token comes later."
        ),
        tables.table(rows),
    ]


def _contender(name: str) -> str:
    """A server and its draft, as people call them."""
    program, _, draft = name.partition(", ")
    model, _, more = draft.partition(" and ")
    shown = {"none": "no draft"}.get(model, tables.model(model))
    shown = f"{shown} and {more}" if more else shown
    return f"**{program}**, {shown}" if program == "specgen" else f"{program}, {shown}"


def _several_rows() -> Iterator[list[str]]:
    for name in ("several-15.json", "several-05.json"):
        report = tables.read(name)
        by_draft: dict[str, list[str]] = {}
        for way in report["ways"]:
            by_draft.setdefault(way["draft"], []).append(tables.number(way["ratio"]))
        yield from _rows(report, name, by_draft)


def _batch_rows() -> Iterator[list[str]]:
    for name in ("batch-15.json", "batch-05.json"):
        report = tables.read(name)
        by_contender: dict[str, list[str]] = {}
        for run in report["runs"]:
            contender, _, draft = run["contender"].partition(", ")
            shown = f"{contender}, {tables.model(draft)}" if draft else contender
            by_contender.setdefault(shown, []).append(f"{run['tokens_per_s']:.1f}")
        yield from _rows(report, name, by_contender)


def _rows(report: Figures, name: str, columns: Mapping[str, list[str]]) -> Iterator[list[str]]:
    target, raw = tables.model(report["target"]), tables.raw(name)
    for row, numbers in columns.items():
        yield [target, tables.model(row), *numbers, raw]
        target = raw = ""


# --- conversations ------------------------------------------------------------------------------


def _conversation() -> list[str]:
    parts = [
        (
            "`python benchmarks/chat.py -m TARGET -md DRAFT -n 120`: ten turns, greedy. Seconds to a turn's "
            "first token in an engine that keeps its cache and decodes only what is new, and in a new engine, "
            "which decodes the whole prompt; then tokens per second with drafts and without."
        )
    ]
    for name in ("chat-15.json", "chat-smollm2.json"):
        report = tables.read(name)
        turns = report["turns"]
        rows = [["turn", *(str(number) for number in range(1, len(turns) + 1))]]
        rows += [
            [heading, *(shown(turn[key]) for turn in turns)]
            for heading, key, shown in (
                ("tokens of the prompt", "n_prompt", str),
                ("of these decoded", "n_decoded", str),
                ("first token, s", "first_token_s", tables.number),
                ("first token if all is decoded again, s", "anew_s", tables.number),
                ("tokens/s", "tokens_per_s", str),
                ("without drafts", "plain_tokens_per_s", str),
            )
        ]
        n_equal = sum(turn["is_equal"] for turn in turns)
        parts += [
            f"## {tables.model(report['target'])}, drafts: {tables.model(report['draft'])}",
            tables.table(rows),
            f"{n_equal} of {len(turns)} texts equal those of a new engine without drafts ({tables.raw(name)}).",
        ]
    return parts


# --- gaps ---------------------------------------------------------------------------------------


def _infill() -> list[str]:
    report = tables.read("infill.json")
    n_gaps, n_passes = report["n_gaps"], report["n_passes"]
    rows = [
        ["drafts", "speed", "median", "worst", "acceptance rate", "tokens a round", "texts equal"]
    ]
    for entry in report["contenders"]:
        contender, _, draft = entry["draft"].partition(", ")
        rows.append(
            [
                f"{contender}, {tables.model(draft)}" if draft else tables.model(contender),
                *(
                    tables.number(entry[key])
                    for key in ("ratio", "median", "worst", "acceptance_rate")
                ),
                tables.number(entry["tokens_per_round"]),
                f"{entry['n_equal']} of {n_gaps}",
            ]
        )
    plain = report["contenders"][0]
    speeds = [run["tokens_per_s"] for run in plain["runs"]]
    n_slow = sum(speed < statistics.median(speeds) / 2 for speed in speeds)
    texts = plain["runs"][:n_gaps]
    n_cut = sum(run["n_tokens"] == report["max_tokens"] for run in texts)
    return [
        (
            f"`python benchmarks/infill.py -m TARGET -md DRAFT --server LLAMA_SERVER` "
            f"({tables.raw('infill.json')}): bodies of functions of 5 to 20 lines, cut out of files of installed "
            f"packages and filled in again by {tables.model(report['target'])}; {n_gaps} gaps, 1600 characters before "
            f"and 500 after them, {report['max_tokens']} tokens of the middle at most, {n_passes} passes. Tokens per "
            "second after the first token, relative to specgen without drafts for the same gap: geometric "
            "mean, median and worst. llama.cpp's server, built from the same source, got the same prompts at `/infill`."
        ),
        tables.table(rows),
        (
            f"{n_slow} of the {len(speeds)} runs without drafts stalled, at less than half of their median "
            "speed, and some with drafts did too: of each contender's runs for a gap the fastest counts. "
            "Each pass is a new process, which starts without measurements. specgen's "
            "texts must equal those without drafts; the server computes with llama.cpp's code, which differs "
            "at near-ties."
        ),
        (
            f"{plain['n_exact']} of {n_gaps} middles begins with exactly the text that was cut out, and {n_cut} reach "
            f"the limit of {report['max_tokens']} tokens."
        ),
    ]
