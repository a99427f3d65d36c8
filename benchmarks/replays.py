r"""Replay known answers at known costs: what a policy decides, without noise.

    specgen bench -m big.gguf -md small.gguf --prompts FILE --json answers.json
    python benchmarks/costs.py big.gguf small.gguf > costs.jsonl
    python benchmarks/replays.py --target big.gguf --prompts FILE --answers answers.json \
        --costs costs.jsonl small.gguf small.gguf:policy=fixed,draft_max=3,draft_p_min=0

Everything that drafts and decides runs as always, the draft model too; the target says what it said
in the recorded answers, and a decode takes what the table of costs says: of any machine, and the
same on a busy one. Specgen's own time is left out. With `--row R`, costs are made up: a token of
the target takes 68 ms, every further row of a batch R of that, and a row of the draft 0.22. Several
settings of one draft file, and several tables, take little longer than one: what the draft model
says is remembered. A table with `change_ms`, two numbers, is of a device that replays graphs: the
first two decodes of a size take so much longer. Each learns from answer to answer.

Of each setting with each table, the time of plain decoding after the first token over that of the
replay: as a geometric mean over categories, of all answers together, and the worst, on stderr; all
of it by answer as one JSON object on stdout. "Without prefill" leaves out what a draft model takes
to prefill the prompt, as programs do that prefill before they count. "Hindsight" takes for each
answer, or for each category, whichever setting of fixed length is best there.

With `--rehearsed N`, each setting makes each answer N times before the one that counts, and knows
nothing else: what it comes to where it knows beforehand how this draft fares in this very answer.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.answers import begin, read_setting
from specgen.llama.cuda_graphs import GraphCostTable
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

#: Costs that are made up: seconds of a token, and what a row of the draft takes of that.
_TOKEN_S = 0.068
_DRAFT_ROW = 0.22
#: A draft model decodes more rows at once only to read a text.
_MOST_DRAFTED = 16
#: Far beyond the logits of all other tokens.
_CERTAIN = 40.0


#: What the first two decodes of a size take more, in seconds, by table; empty if sizes do not
#: matter.
CHANGES: dict[CostTable, tuple[float, ...]] = {}


@dataclass
class Clock:
    """Time that passes where it is said to."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Timed:
    """A backend whose decodes take the time that a table gives.

    It is a `Backend`: whatever is not here is delegated to the inner one.
    """

    inner: Backend
    costs: CostTable
    clock: Clock
    decode_s: float = 0.0
    #: A backend that remembers decodes fewer.
    n_decoded_rows: int = 0
    #: Seconds of decodes of so many rows that a text was read in them.
    prefill_s: float = 0.0
    #: What the first two decodes of a size take more; how many decodes before had the last one's
    #: size.
    change_s: tuple[float, ...] = ()
    n_last: int = 0
    n_same: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decode(self, batch: Batch) -> Logits:
        n_rows = len(batch)
        self.n_same = self.n_same + 1 if n_rows == self.n_last else 0
        self.n_last = n_rows
        seconds = self.costs.seconds(n_rows) + sum(self.change_s[self.n_same : self.n_same + 1])
        self.decode_s += seconds
        self.clock.now_s += seconds
        self.n_decoded_rows += len(batch)
        if len(batch) > _MOST_DRAFTED:
            self.prefill_s += seconds
        return self.inner.decode(batch)


@dataclass
class Script:
    """A target's language when it writes one fixed text.

    What would follow another text does not matter, because whatever leads there is rejected.
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
class Told:
    """A recorded answer: its prompt, its tokens, and whether it ended by itself."""

    prompt: BenchPrompt
    tokens: tuple[int, ...]
    ended: bool


def read_answers(path: Path, prompts: Path, count: int | None) -> list[Told]:
    """Return the answers of plain decoding from the output of `specgen bench --json`, in order.

    Only the first answer to each prompt counts, and only so many prompts of each category.
    """
    by_number = {prompt.number: prompt for prompt in read_bench_prompts(prompts)}
    found: dict[int, Told] = {}
    for result in json.loads(path.read_text(encoding="utf-8"))["results"]:
        outcome, number = result["outcome"], result["prompt"]
        if result["is_plain"] and result["temperature"] == 0.0 and number not in found:
            tokens, ended = tuple(outcome["token_ids"]), outcome["finish_reason"] == "stop"
            if len(tokens) + ended > 1:
                found[number] = Told(by_number[number], tokens, ended)
    told = list(found.values())
    if count is None:
        return told
    return [found[prompt.number] for prompt in first_of_each((t.prompt for t in told), count)]


def made_up(row: float) -> list[CostTable]:
    """Tables of a target and of a draft model whose rows cost so much of a token."""
    sizes = range(1, 257)
    flat = CostTable({n: _TOKEN_S * (1.0 + row * (n - 1)) for n in sizes})
    return [flat, CostTable({n: _TOKEN_S * _DRAFT_ROW * n for n in sizes})]


def read_costs(path: Path, models: Sequence[Path]) -> dict[str, list[CostTable]]:
    """Return the cost tables of the models.

    They are found by the files' names, for each kind of kernels and each length of the context.
    """
    found: dict[str, dict[str, CostTable]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        table = CostTable({int(n): ms / 1000 for n, ms in told["ms"].items()})
        CHANGES[table] = tuple(ms / 1000 for ms in told.get("change_ms", ()))
        name = f"{path.stem}, {told['kernels']}, {told['context']} tokens in context"
        found.setdefault(name, {})[told["model"]] = table
    return {name: [tables[model.name] for model in models] for name, tables in found.items()}


class Entrant:
    """A setting with a table of costs, and what it came to so far."""

    def __init__(
        self, target: Path, setting: str, costs: Sequence[CostTable], costs_name: str, n: int
    ) -> None:
        self.setting, self.costs_name = setting, costs_name
        self._costs = costs
        self._clock = Clock()
        draft, drafting = read_setting(setting)
        self.draft = draft
        self.is_fixed = drafting.policy == "fixed"
        options = SessionOptions(
            target, draft, drafting=drafting, generation=GenerationOptions(max_tokens=n)
        )
        self._loaded = Session(options, self._clock, MeasurementStore())
        self.found: list[dict[str, Any]] = []
        self._changes = CHANGES.get(costs[0], ())
        if self._changes:
            self._loaded.costs.kind = partial(GraphCostTable, n_layer=self._loaded.target.n_layer)
        tables = [self._loaded.costs.table()]
        if isinstance(draft, Path):
            tables.append(self._loaded.costs.table(draft))
        n_known = max(self._loaded.n_rows_max, MIN_SIZES)
        for table, known in zip(tables, costs, strict=False):
            for n_rows in range(1, n_known + 1):
                table.set_seconds(n_rows, known.seconds(n_rows))
        if drafting.is_by_cost:
            measure_costs(self._loaded)
        self._known_first = copy.deepcopy(vars(self._loaded.measurements))

    def close(self) -> None:
        self._loaded.close()

    def rehearse(self, told: Told, real: Backend, draft: MemoBackend | None, n: int) -> None:
        """Forget what was learnt, and make an answer n times without counting it."""
        vars(self._loaded.measurements).update(copy.deepcopy(self._known_first))
        for _ in range(n):
            self.replay(told, real, draft)
            self.found.pop()

    def replay(self, told: Told, real: Backend, draft: MemoBackend | None) -> None:
        """Replay an answer, in contexts that need only the draft's logits."""
        if draft is not None:
            for sequence in range(draft.n_sequences):
                draft.remove(sequence)
        loaded, clock = self._loaded, self._clock
        prompt = begin(loaded, told.prompt.text)
        vocabulary = loaded.target.vocabulary
        end = (vocabulary.end_tokens()[0],) if told.ended else ()
        said = FakeBackend(
            vocabulary,  # type: ignore[arg-type]
            Script((*prompt.tokens, *told.tokens, *end), vocabulary.n_tokens),
            n_ctx=real.n_ctx,
            n_batch=real.n_batch,
            n_outputs=loaded.n_rows_max,
            n_sequences=loaded.n_branches_max,
        )
        target = cast(Backend, Timed(said, self._costs[0], clock, change_s=self._changes))
        drafting = () if draft is None else (cast(Backend, Timed(draft, self._costs[1], clock)),)
        generation = DrafterFactory(loaded).new_answer(prompt, real.n_ctx, drafting, seed=1)
        loop = AnswerLoop(target, clock)
        list(loop.run(generation))
        assert tuple(generation.answer) == told.tokens, "the recorded answer"
        finished = loop.finish(generation, CostTable())
        seconds = finished.wall_s - finished.prompt_s
        prefill_s = cast(Timed, drafting[0]).prefill_s if drafting else 0.0
        n_plain = len(told.tokens) + told.ended - 1
        plain_s = n_plain * self._costs[0].seconds(1) + sum(self._changes)
        self.found.append(
            {
                "prompt": told.prompt.number,
                "category": told.prompt.category,
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
            **sums(self.found),
            "answers": self.found,
        }


def sums(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the answers come to."""
    by_category: dict[str, list[float]] = {}
    for answer in found:
        by_category.setdefault(answer["category"], []).append(answer["speedup"])
    means = {name: statistics.geometric_mean(values) for name, values in by_category.items()}
    total = sum(answer["plain_s"] for answer in found) / sum(answer["seconds"] for answer in found)
    without_prefill = [
        answer["plain_s"] / (answer["seconds"] - answer["prefill_s"]) for answer in found
    ]
    return {
        "all": round(statistics.geometric_mean(means.values()), 3),
        "without_prefill": round(statistics.geometric_mean(without_prefill), 3),
        "together": round(total, 3),
        "worst": min(answer["speedup"] for answer in found),
        "categories": {name: round(mean, 2) for name, mean in means.items()},
    }


def hindsight(results: Sequence[Mapping[str, Any]], *, by: str) -> dict[str, Any]:
    """Return the result of choosing the best of several results in hindsight.

    The choice is made for each `category` or, with "prompt", for each answer.
    """
    best: dict[object, list[Mapping[str, Any]]] = {}
    for result in results:
        groups: dict[object, list[Mapping[str, Any]]] = {}
        for answer in result["answers"]:
            groups.setdefault(answer[by], []).append(answer)
        for group, answers in groups.items():
            if group not in best or _speed(answers) > _speed(best[group]):
                best[group] = answers
    found = [answer for answers in best.values() for answer in answers]
    return {"setting": f"hindsight by {by}", "costs": results[0]["costs"], **sums(found)}


def _speed(answers: Sequence[Mapping[str, Any]]) -> float:
    return statistics.geometric_mean(answer["speedup"] for answer in answers)


def parser_of_answers(about: str | None) -> argparse.ArgumentParser:
    """A command line that names recorded answers, their prompts and the model that gave them."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, type=Path)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--answers", required=True, type=Path)
    parser.add_argument("--count", type=int, help="answers of each category")
    return parser


def main() -> None:
    parser = parser_of_answers(__doc__)
    parser.add_argument("--max-tokens", type=int, default=128, help="of the recorded answers")
    parser.add_argument("--costs", type=Path, action="append", default=[])
    parser.add_argument("--row", type=float, action="append", default=[])
    parser.add_argument("--rehearsed", type=int, default=0, metavar="N")
    parser.add_argument("settings", nargs="+", help="DRAFT[:option=value,...]; one draft file")
    asked = parser.parse_args()
    answers = read_answers(asked.answers, asked.prompts, asked.count)
    drafts = {draft for draft, _ in map(read_setting, asked.settings) if isinstance(draft, Path)}
    if len(drafts) > 1:
        parser.error("settings of one draft file")
    if not asked.costs and not asked.row:
        parser.error("no costs: --costs or --row")
    models = [asked.target, *drafts]
    tables: dict[str, list[CostTable]] = {}
    for path in asked.costs:
        tables |= read_costs(path, models)
    tables |= {f"a row {row:g}": made_up(row) for row in asked.row}
    with contextlib.ExitStack() as stack:
        entrants = []
        for name, costs in tables.items():
            for setting in asked.settings:
                entrant = Entrant(asked.target, setting, costs, name, asked.max_tokens)
                stack.callback(entrant.close)
                entrants.append(entrant)
        options = SessionOptions(
            asked.target,
            next(iter(drafts), "none"),
            generation=GenerationOptions(max_tokens=asked.max_tokens),
        )
        loaded = stack.enter_context(Session(options, Clock()))
        for number, told in enumerate(answers, 1):
            n_ctx = loaded.context_size(len(begin(loaded, told.prompt.text).tokens))
            with loaded.contexts(n_ctx) as (real, opened):
                memo = MemoBackend(opened[0]) if opened else None
                for entrant in entrants:
                    drafting = memo if entrant.draft in drafts else None
                    if asked.rehearsed:
                        entrant.rehearse(told, real, drafting, asked.rehearsed)
                    entrant.replay(told, real, drafting)
            print(f"{number} of {len(answers)}", file=sys.stderr, end="\r", flush=True)
        report([entrant.result() for entrant in entrants], [e.is_fixed for e in entrants])


def report(results: Sequence[dict[str, Any]], is_fixed: Sequence[bool]) -> None:
    """Tell what came of it."""
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
            f"{line['costs']}, {line['setting']}: {line['all']:.3f}, all answers together "
            f"{line['together']:.3f}, without prefill {line['without_prefill']:.3f}, "
            f"worst {line['worst']:.2f};",
            ", ".join(f"{name} {mean:.2f}" for name, mean in line["categories"].items()),
            file=sys.stderr,
        )
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
