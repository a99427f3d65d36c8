r"""Replay recorded answers with simulated decode times: what a policy decides, without noise.

    specgen bench -m big.gguf -md small.gguf --prompts FILE --json answers.json
    python benchmarks/costs.py big.gguf small.gguf > costs.jsonl
    python benchmarks/replays.py --target big.gguf --prompts FILE --answers answers.json \
        --costs costs.jsonl small.gguf small.gguf:policy=fixed,draft_max=3,draft_p_min=0

The drafters, the policy and the draft model run as usual. The target is replaced by the recorded
answers, and each decode takes the simulated time that a cost table gives for it. So the table can
be of any machine, and the result is the same on a busy one. specgen's own overhead is not
simulated.

Several settings of one draft file, and several tables, take little longer than one, because the
draft model's logits are remembered. Each setting learns from answer to answer.

Costs come from tables, or are invented:

- `--costs FILE`: tables that `benchmarks/costs.py` printed. A table with `change_ms`, two numbers,
  is that of a device that captures graphs: the first two decodes of a batch size take this much
  longer.
- `--row R`: decoding one token with the target takes 68 ms, each further row of a batch adds R
  times that, and each row of the draft takes 0.22 times that.

Prints to stderr, for each setting with each table, the speed-up over plain decoding after the first
token: the geometric mean over categories, the ratio of the total times, and the worst answer.
"without prefill" leaves out the draft model's prefill, as programs do that start their clock after
it. "hindsight" picks, for each answer or for each category, the best of the settings with a fixed
draft length. Prints to stdout one JSON list with the figures of each answer.

With `--cold alone`, nothing is learnt from answer to answer. With `--cold phrases`, neither, but
n-grams search the phrases that all other answers have in common, as if another process had
generated those before.

With `--rehearsed N`, each setting forgets what it has learnt and generates an answer N times before
the run that counts. This shows the speed-up if it is known in advance how well the draft does in
this answer.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from benchmarks.answers import format_prompt, read_setting
from specgen.drafters.shared_phrases import SharedPhrases, phrases_file
from specgen.llama.cuda_graphs import GraphCostTable
from specgen.measure.benchmark import PLAIN
from specgen.measure.prompts import BenchPrompt, first_of_each, read_bench_prompts
from specgen.method.answer_loop import AnswerLoop
from specgen.method.backend import Backend, Batch
from specgen.method.cost_table import CostTable
from specgen.options import GenerationOptions, SessionOptions
from specgen.session.calibration import MIN_SIZES, measure_costs
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.measurement_store import MeasurementStore
from specgen.session.session import Session
from specgen.system.arrays import Logits
from tests.helpers.fake_backend import FakeBackend
from tests.helpers.joint_draws import MemoBackend

#: Invented costs: the seconds that the target takes for one token, and the time of a row of the
#: draft relative to that.
_TOKEN_S = 0.068
_DRAFT_ROW = 0.22
#: A draft model's larger batches are those of a prefill.
_MAX_DRAFT_ROWS = 16
#: The logit of the recorded token. All others are 0.
_CERTAIN = 40.0


#: The tokens of a prompt, and those of its answer.
Text: TypeAlias = tuple[Sequence[int], Sequence[int]]
#: The extra seconds of the first two decodes of a batch size, by table. Empty for devices that do
#: not capture graphs.
CHANGES: dict[CostTable, tuple[float, ...]] = {}


@dataclass
class Clock:
    """Simulated time."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class TimedBackend:
    """A `Backend` whose decodes take the simulated time of a cost table.

    Everything else is delegated to the inner backend.
    """

    inner: Backend
    costs: CostTable
    clock: Clock
    decode_s: float = 0.0
    #: All rows, including those that an inner backend with a memory did not have to decode.
    n_decoded_rows: int = 0
    #: The seconds of decodes with more than `_MAX_DRAFT_ROWS` rows.
    prefill_s: float = 0.0
    #: The extra seconds of the first two decodes of a batch size.
    change_s: tuple[float, ...] = ()
    #: The batch size of the last decode, and how many decodes before it had the same size.
    n_last: int = 0
    n_same: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decode(self, batch: Batch) -> Logits:
        n_rows = len(batch)
        self.n_same = self.n_same + 1 if n_rows == self.n_last else 0
        self.n_last = n_rows
        seconds = self.costs.seconds(n_rows)
        if self.n_same < len(self.change_s):
            seconds += self.change_s[self.n_same]
        self.decode_s += seconds
        self.clock.now_s += seconds
        self.n_decoded_rows += len(batch)
        if len(batch) > _MAX_DRAFT_ROWS:
            self.prefill_s += seconds
        return self.inner.decode(batch)


@dataclass
class Script:
    """The logits of a target that generates one fixed text.

    The logits after any other text do not matter, because a token that leads there is rejected.
    """

    text: tuple[int, ...]
    n_vocab: int
    _row: Logits = field(init=False)

    def __post_init__(self) -> None:
        self._row = np.zeros(self.n_vocab, np.float32)

    def __call__(self, text: tuple[int, ...]) -> Logits:
        row = self._row.copy()
        if len(text) < len(self.text):
            row[self.text[len(text)]] = _CERTAIN
        return row


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """An answer to replay."""

    prompt: BenchPrompt
    tokens: tuple[int, ...]
    #: Whether it ended with an end-of-text token, instead of at the limit.
    is_complete: bool

    @property
    def n_decoded(self) -> int:
        """The number of tokens, an end-of-text token included."""
        return len(self.tokens) + 1 if self.is_complete else len(self.tokens)


def read_answers(path: Path, prompts: Path, count: int | None) -> list[RecordedAnswer]:
    """Return the greedy answers of plain decoding from the output of `specgen bench --json`.

    Args:
        path: The output of `specgen bench --json`. Only the first answer to each prompt is used.
        prompts: The file of the prompts.
        count: The number of answers in each category; None for all.
    """
    by_number = {prompt.number: prompt for prompt in read_bench_prompts(prompts)}
    answers: dict[int, RecordedAnswer] = {}
    for result in json.loads(path.read_text(encoding="utf-8"))["results"]:
        number = result["prompt"]
        if result["contender"] != PLAIN or result["temperature"] != 0.0 or number in answers:
            continue
        outcome = result["outcome"]
        is_complete = outcome["finish_reason"] == "stop"
        answer = RecordedAnswer(by_number[number], tuple(outcome["token_ids"]), is_complete)
        if answer.n_decoded > 1:
            answers[number] = answer
    if count is None:
        return list(answers.values())
    chosen = first_of_each((answer.prompt for answer in answers.values()), count)
    return [answers[prompt.number] for prompt in chosen]


def invented_costs(row: float) -> list[CostTable]:
    """Return cost tables of a target and of a draft model.

    Args:
        row: What each further row of a batch adds, relative to the time of one token.
    """
    sizes = range(1, 257)
    return [
        CostTable({n: _TOKEN_S * (1.0 + row * (n - 1)) for n in sizes}),
        CostTable({n: _TOKEN_S * _DRAFT_ROW * n for n in sizes}),
    ]


def read_costs(path: Path, models: Sequence[Path]) -> dict[str, list[CostTable]]:
    """Return the cost tables of some models from the output of `benchmarks/costs.py`.

    Args:
        path: The output.
        models: The models, which are found by their file names.

    Returns:
        A table for each model, for each kind of kernels and each length of the context.
    """
    tables_by_name: dict[str, dict[str, CostTable]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        measured = json.loads(line)
        table = CostTable({int(n): ms / 1000 for n, ms in measured["ms"].items()})
        CHANGES[table] = tuple(ms / 1000 for ms in measured.get("change_ms", ()))
        name = f"{path.stem}, {measured['kernels']}, {measured['context']} tokens in context"
        tables_by_name.setdefault(name, {})[measured["model"]] = table
    return {
        name: [tables[model.name] for model in models] for name, tables in tables_by_name.items()
    }


class Entrant:
    """A setting with cost tables, and the results of its replays so far."""

    def __init__(
        self,
        target: Path,
        setting: str,
        costs: Sequence[CostTable],
        costs_name: str,
        max_tokens: int,
        cache: Path | None = None,
    ) -> None:
        """Load the setting.

        Args:
            target: The target's file.
            setting: The draft with its options.
            costs: The cost tables of the target and of the draft.
            costs_name: The name of these tables.
            max_tokens: The limit of the answers.
            cache: The folder with the phrases of other answers; None for none.
        """
        self.setting = setting
        self.costs_name = costs_name
        self._costs = costs
        self._clock = Clock()
        draft, drafting = read_setting(setting)
        self.draft = draft
        self.is_fixed = drafting.policy == "fixed"
        generation = GenerationOptions(max_tokens=max_tokens)
        options = SessionOptions(
            target,
            draft,
            drafting=drafting,
            generation=generation,
            cache=cache,
            phrase_store=cache is not None,
        )
        self._loaded = Session(options, self._clock, MeasurementStore())
        self._factory = DrafterFactory(self._loaded)
        #: The figures of each replay.
        self.replays: list[dict[str, Any]] = []
        self._changes = CHANGES.get(costs[0], ())
        if self._changes:
            self._loaded.costs.kind = partial(GraphCostTable, n_layer=self._loaded.target.n_layer)
        tables = [self._loaded.costs.table()]
        if isinstance(draft, Path):
            tables.append(self._loaded.costs.table(draft))
        n_sizes = max(self._loaded.n_rows_max, MIN_SIZES)
        for table, simulated in zip(tables, costs, strict=False):
            for n_rows in range(1, n_sizes + 1):
                table.set_seconds(n_rows, simulated.seconds(n_rows))
        if drafting.is_by_cost:
            measure_costs(self._loaded)
        self._initial_measurements = copy.deepcopy(vars(self._loaded.measurements))

    def close(self) -> None:
        self._loaded.close()

    def start_cold(self) -> None:
        """Forget what was learnt from earlier answers, and read the phrases in the cache folder."""
        vars(self._loaded.measurements).update(copy.deepcopy(self._initial_measurements))
        self._factory = DrafterFactory(self._loaded)

    def rehearse(
        self, answer: RecordedAnswer, real: Backend, draft: MemoBackend | None, n_times: int
    ) -> None:
        """Forget what was learnt, and replay an answer several times without counting it."""
        self.start_cold()
        for _ in range(n_times):
            self.replay(answer, real, draft)
            self.replays.pop()
        self._factory = DrafterFactory(self._loaded)  # the answer must not be found in memory

    def replay(self, answer: RecordedAnswer, real: Backend, draft: MemoBackend | None) -> None:
        """Replay an answer.

        Args:
            answer: The recorded answer.
            real: A context of the target. Only its sizes are used.
            draft: A context of the draft model, if the setting has one.
        """
        if draft is not None:
            for sequence in range(draft.n_sequences):
                draft.remove(sequence)
        loaded = self._loaded
        clock = self._clock
        prompt = format_prompt(loaded, answer.prompt.text)
        vocabulary = loaded.target.vocabulary
        end = (vocabulary.end_tokens()[0],) if answer.is_complete else ()
        scripted = FakeBackend(
            vocabulary,  # type: ignore[arg-type]
            Script((*prompt.tokens, *answer.tokens, *end), vocabulary.n_tokens),
            n_ctx=real.n_ctx,
            n_batch=real.n_batch,
            n_outputs=loaded.n_rows_max,
            n_sequences=loaded.n_branches_max,
        )
        target = TimedBackend(scripted, self._costs[0], clock, change_s=self._changes)
        timed_drafts = [] if draft is None else [TimedBackend(draft, self._costs[1], clock)]
        contexts = tuple(cast(Backend, timed) for timed in timed_drafts)
        generation = self._factory.new_answer(prompt, real.n_ctx, contexts, seed=1)
        loop = AnswerLoop(cast(Backend, target), clock)
        list(loop.run(generation))
        assert tuple(generation.answer) == answer.tokens, "the recorded answer"
        self._factory.find_phrases(generation)
        finished = loop.finish(generation, CostTable())
        seconds = finished.wall_s - finished.prompt_s
        prefill_s = sum(timed.prefill_s for timed in timed_drafts)
        n_later = answer.n_decoded - 1
        plain_s = n_later * self._costs[0].seconds(1) + sum(self._changes)
        self.replays.append(
            {
                "prompt": answer.prompt.number,
                "category": answer.prompt.category,
                "n_tokens": finished.n_tokens,
                "plain_s": round(plain_s, 3),
                "seconds": round(seconds, 3),
                "speedup": round(plain_s / seconds, 3),
                "n_rounds": finished.n_rounds,
                "n_drafted": finished.n_drafted,
                "n_accepted": finished.n_accepted,
                "draft_s": round(finished.draft_s, 3),
                "prefill_s": round(prefill_s, 3),
            }
        )

    def result(self) -> dict[str, Any]:
        name = Path(self.setting).name
        return {
            "costs": self.costs_name,
            "setting": name,
            **summary_of(self.replays),
            "answers": self.replays,
        }


def texts_of(session: Session, answers: Sequence[RecordedAnswer]) -> dict[int, Text]:
    """Return the tokens of prompts and answers, by the numbers of the prompts."""
    texts: dict[int, Text] = {}
    for answer in answers:
        prompt = format_prompt(session, answer.prompt.text)
        texts[answer.prompt.number] = (prompt.tokens, answer.tokens)
    return texts


def write_phrases(file: Path, answers: Mapping[int, Text], without: int) -> None:
    """Store the phrases that answers have in common, as a process with all of them would.

    Args:
        file: The file, which is replaced.
        answers: The tokens of prompts and answers, as `texts_of` returns them.
        without: The number of an answer that is left out.
    """
    file.unlink(missing_ok=True)
    phrases = SharedPhrases(file)
    for number, (prompt, answer) in answers.items():
        if number != without:
            phrases.add(prompt, answer)
    phrases.save()


def summary_of(replays: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the speed-ups of a setting, from the figures of each answer."""
    by_category: dict[str, list[float]] = {}
    for each in replays:
        by_category.setdefault(each["category"], []).append(each["speedup"])
    means = {name: statistics.geometric_mean(values) for name, values in by_category.items()}
    total = sum(each["plain_s"] for each in replays) / sum(each["seconds"] for each in replays)
    without_prefill = [each["plain_s"] / (each["seconds"] - each["prefill_s"]) for each in replays]
    return {
        "all": round(statistics.geometric_mean(means.values()), 3),
        "without_prefill": round(statistics.geometric_mean(without_prefill), 3),
        "together": round(total, 3),
        "worst": min(each["speedup"] for each in replays),
        "categories": {name: round(mean, 2) for name, mean in means.items()},
    }


def hindsight(results: Sequence[Mapping[str, Any]], *, by: str) -> dict[str, Any]:
    """Return the result of choosing the best setting in hindsight.

    Args:
        results: The results of the settings to choose from.
        by: "category" to choose a setting for each category, or "prompt" for each answer.
    """
    best: dict[object, list[Mapping[str, Any]]] = {}
    for result in results:
        groups: dict[object, list[Mapping[str, Any]]] = {}
        for answer in result["answers"]:
            groups.setdefault(answer[by], []).append(answer)
        for group, answers in groups.items():
            if group not in best or _speed(answers) > _speed(best[group]):
                best[group] = answers
    chosen = [answer for answers in best.values() for answer in answers]
    return {"setting": f"hindsight by {by}", "costs": results[0]["costs"], **summary_of(chosen)}


def _speed(answers: Sequence[Mapping[str, Any]]) -> float:
    return statistics.geometric_mean(answer["speedup"] for answer in answers)


def parser_of_answers(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with options for recorded answers, their prompts and their model."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, type=Path, help="the model of the answers")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument(
        "--answers", required=True, type=Path, help="the output of `specgen bench --json`"
    )
    parser.add_argument("--count", type=int, help="answers per category")
    return parser


def main() -> None:
    parser = parser_of_answers(__doc__)
    parser.add_argument("--max-tokens", type=int, default=128, help="limit of the recorded answers")
    parser.add_argument(
        "--costs", type=Path, action="append", default=[], help="the output of benchmarks/costs.py"
    )
    parser.add_argument(
        "--row", type=float, action="append", default=[], help="invented costs, instead of --costs"
    )
    parser.add_argument(
        "--rehearsed", type=int, default=0, metavar="N", help="generate each answer N times before"
    )
    parser.add_argument(
        "--cold",
        choices=("alone", "phrases"),
        help="learn nothing from other answers, or only their phrases",
    )
    parser.add_argument(
        "settings", nargs="+", help="DRAFT[:option=value,...], with at most one draft file"
    )
    arguments = parser.parse_args()
    answers = read_answers(arguments.answers, arguments.prompts, arguments.count)
    drafts = {
        draft for draft, _ in map(read_setting, arguments.settings) if isinstance(draft, Path)
    }
    if len(drafts) > 1:
        parser.error("the settings name several draft files; only one is possible")
    if not arguments.costs and not arguments.row:
        parser.error("--costs or --row is required")
    models = [arguments.target, *drafts]
    tables: dict[str, list[CostTable]] = {}
    for path in arguments.costs:
        tables |= read_costs(path, models)
    tables |= {f"row cost {row:g}": invented_costs(row) for row in arguments.row}
    with contextlib.ExitStack() as stack:
        cache: Path | None = None
        if arguments.cold == "phrases":
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        entrants = []
        for name, costs in tables.items():
            for setting in arguments.settings:
                entrant = Entrant(
                    arguments.target, setting, costs, name, arguments.max_tokens, cache
                )
                stack.callback(entrant.close)
                entrants.append(entrant)
        options = SessionOptions(
            arguments.target,
            next(iter(drafts), "none"),
            generation=GenerationOptions(max_tokens=arguments.max_tokens),
        )
        loaded = stack.enter_context(Session(options, Clock()))
        texts = texts_of(loaded, answers)
        for number, answer in enumerate(answers, 1):
            prompt_tokens, _ = texts[answer.prompt.number]
            n_ctx = loaded.context_size(len(prompt_tokens))
            with loaded.contexts(n_ctx) as (real, draft_contexts):
                memo = MemoBackend(draft_contexts[0]) if draft_contexts else None
                if cache is not None:
                    file = phrases_file(cache, loaded.target.vocabulary.digest())
                    write_phrases(file, texts, without=answer.prompt.number)
                for entrant in entrants:
                    drafting = memo if entrant.draft in drafts else None
                    if arguments.cold is not None:
                        entrant.start_cold()
                    if arguments.rehearsed:
                        entrant.rehearse(answer, real, drafting, arguments.rehearsed)
                    entrant.replay(answer, real, drafting)
            print(f"{number} of {len(answers)}", file=sys.stderr, end="\r", flush=True)
        report([entrant.result() for entrant in entrants], [e.is_fixed for e in entrants])


def report(results: Sequence[dict[str, Any]], is_fixed: Sequence[bool]) -> None:
    """Print the results, and what the best settings in hindsight would give."""
    lines = list(results)
    for costs in dict.fromkeys(result["costs"] for result in results):
        fixed = [
            result
            for result, fixed in zip(results, is_fixed, strict=True)
            if fixed and result["costs"] == costs
        ]
        if len(fixed) > 1:
            lines += [hindsight(fixed, by="category"), hindsight(fixed, by="prompt")]
    for line in lines:
        print(
            f"{line['costs']}, {line['setting']}: {line['all']:.3f}, total time "
            f"{line['together']:.3f}, without prefill {line['without_prefill']:.3f}, "
            f"worst {line['worst']:.2f};",
            ", ".join(f"{name} {mean:.2f}" for name, mean in line["categories"].items()),
            file=sys.stderr,
        )
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
