"""Make `specgen/drafters/common_phrases.json`: what answers to different prompts have in common.

    specgen batch scripts/common_phrase_prompts.jsonl FIRST.jsonl -m MODEL -n 160 -md none
    specgen batch scripts/common_phrase_prompts.jsonl SECOND.jsonl -m OTHER -n 160 -md none
    python -m scripts.make_common_phrases MODEL FIRST.jsonl SECOND.jsonl

MODEL is any file with the vocabulary that divides the answers into tokens; all of them get the same
list of texts. The results may have answers of several models.

None of the prompts is from a benchmark, so that benchmarks show how well the phrases do elsewhere.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from specgen.drafters.shared_phrases import SHORTEST
from specgen.llama.model import LlamaModel
from specgen.text.vocabulary import Vocabulary

_FOLDER = Path(__file__).parent
PROMPTS = _FOLDER / "common_phrase_prompts.jsonl"
OUTPUT = _FOLDER.parent / "specgen" / "drafters" / "common_phrases.json"
#: The answers to this many prompts must have a phrase in common.
LEAST_PROMPTS = 3

#: Tokens of the shortest length.
Ngram: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, with its prompt."""

    #: The number of the prompt, which answers of several models share.
    prompt_number: int
    #: The tokens of the prompt.
    prompt: Sequence[int]
    #: The tokens of the answer.
    tokens: Sequence[int]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("results", nargs="+", type=Path, help="results of specgen batch")
    arguments = parser.parse_args()
    vocabulary = LlamaModel(arguments.model, vocabulary_only=True).vocabulary
    answers = [answer for path in arguments.results for answer in read_answers(path, vocabulary)]
    phrases = find_phrases(answers)
    texts = [text_of(vocabulary, phrase) for phrase in phrases]
    # Without texts that begin or end within a character.
    kept = [text for text in dict.fromkeys(texts) if "\N{REPLACEMENT CHARACTER}" not in text]
    OUTPUT.write_text(json.dumps(kept, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    n_tokens = sum(map(len, phrases))
    print(f"{OUTPUT}: {len(kept)} phrases, {n_tokens} tokens, of {len(answers)} answers")


def read_answers(results: Path, vocabulary: Vocabulary) -> Iterator[Answer]:
    """Yield the answers in a file that `specgen batch` wrote."""

    def tokenize(text: str) -> list[int]:
        return vocabulary.tokenize(text, add_special=False, parse_special=False)

    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    prompts = [tokenize(json.loads(line)["prompt"]) for line in lines]
    for line in results.read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        number = int(result["custom_id"])
        message = result["response"]["body"]["choices"][0]["message"]
        yield Answer(number, prompts[number - 1], tokenize(message["content"]))


def find_phrases(answers: Iterable[Answer]) -> list[list[int]]:
    """Return the phrases that answers to `LEAST_PROMPTS` prompts share, without quotations."""
    answers = list(answers)
    prompts_of: defaultdict[Ngram, set[int]] = defaultdict(set)
    for answer in answers:
        for ngram in ngrams_of(answer.tokens):
            prompts_of[ngram].add(answer.prompt_number)
    phrases: list[list[int]] = []
    known: set[Ngram] = set()
    for answer in answers:
        quoted = set(ngrams_of(answer.prompt))
        phrase: list[int] = []
        # An empty n-gram at the end completes the last phrase.
        for ngram in [*ngrams_of(answer.tokens), ()]:
            is_shared = ngram not in quoted and len(prompts_of.get(ngram, ())) >= LEAST_PROMPTS
            if is_shared:
                # Neighbouring n-grams that are shared make up one phrase.
                phrase += ngram[-1:] if phrase else ngram
                continue
            if phrase and not known.issuperset(ngrams_of(phrase)):
                known.update(ngrams_of(phrase))
                phrases.append(phrase)
            phrase = []
    return phrases


def ngrams_of(tokens: Sequence[int]) -> list[Ngram]:
    """Return the n-grams of a text, of the shortest length, in order."""
    return [tuple(tokens[i : i + SHORTEST]) for i in range(len(tokens) - SHORTEST + 1)]


def text_of(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    """Return the text of tokens, with a replacement character for each half of a character."""
    return b"".join(map(vocabulary.token_bytes, tokens)).decode(errors="replace")


if __name__ == "__main__":
    main()
