"""Speculative sampling on one screen: a draft model proposes tokens, the target verifies them.

    python -m specgen.examples.minimal target.gguf draft.gguf "Once upon a time"

The output has exactly the target's distribution; at temperature 0 it is the target's greedy text.
This is Algorithm 1 of Leviathan et al. (arXiv:2211.17192); see also Chen et al. (arXiv:2302.01318).

    the paper          here
    prefix             text                        the tokens so far
    gamma              n_draft                     the number of drafted tokens
    x_1 ... x_gamma    drafted                     int[n_draft]
    q_i(x)             draft_probs[i - 1]          float64[n_vocab], x_i was sampled from it
    p_i(x)             target_probs[i - 1]         float64[n_vocab], for i = 1 ... gamma + 1
    n                  n_accepted                  the length of the accepted prefix
    p'(x), t           next_probs, next_token      the distribution of one more token, and the token
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from specgen.errors import PairError, PromptError, SpecgenError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.method.backend import Backend, Batch
from specgen.options import ContextOptions, KernelOptions
from specgen.session.open import start_kernels
from specgen.system.arrays import ProbArray

N_DRAFT = 4
N_CTX = 2048
MAX_TOKENS = 256


def speculative_round(
    target: Backend,
    draft: Backend,
    text: Sequence[int],
    n_draft: int,
    temperature: float,
    rng: np.random.Generator,
) -> list[int]:
    """Run one round, and return the tokens that it adds to the text: 1 to n_draft + 1 of them.

    Before and after a round, each KV cache holds a prefix of the text, without its last token.
    """
    # To drop tokens later, a model with a recurrent state goes back to this checkpoint.
    target.checkpoint(0)
    draft.checkpoint(0)

    # Draft: sample n_draft tokens from the draft model, one after the other.
    drafted: list[int] = []
    draft_probs: list[ProbArray] = []
    for _ in range(n_draft):
        probs = next_token_probs(draft, [*text, *drafted], 1, temperature)[0]  # float64[n_vocab]
        draft_probs.append(probs)
        drafted.append(sample(probs, rng))

    # Verify: one decode of the target gives its distributions at all n_draft + 1 positions.
    target_probs = next_token_probs(target, [*text, *drafted], n_draft + 1, temperature)

    # Accept each token with probability min(1, p / q), up to the first rejection.
    n_accepted = 0
    for token in drafted:
        ratio = target_probs[n_accepted][token] / draft_probs[n_accepted][token]
        if rng.random() >= min(1.0, ratio):
            break
        n_accepted += 1

    # Sample one more token: a corrected one from the residual, or a bonus token from the target.
    # (A token is rejected only if p < q for it. Then p > q for another: the residual is not 0.)
    next_probs = target_probs[n_accepted]  # float64[n_vocab]
    if n_accepted < n_draft:
        residual = np.maximum(0.0, next_probs - draft_probs[n_accepted])
        next_probs = residual / residual.sum()
    next_token = sample(next_probs, rng)

    # Roll back: drop the rejected tokens from both caches. (If all were accepted, the last one is
    # not in the draft's cache yet. The next round decodes it.)
    n_kept = len(text) + n_accepted
    target.remove(0, n_kept)
    draft.remove(0, n_kept)
    return [*drafted[:n_accepted], next_token]


def next_token_probs(
    backend: Backend,
    text: Sequence[int],
    n_last: int,
    temperature: float,
) -> ProbArray:
    """Decode the tokens of a text that are not in the cache yet.

    Args:
        backend: The model and its cache.
        text: The text. At least n_last of its tokens are not in the cache.
        n_last: The number of tokens, at the end of the text, to return a distribution for.
        temperature: The temperature; 0 gives the most likely token probability 1.

    Returns:
        float64[n_last, n_vocab]: for each of the last n_last tokens, the distribution of the token
        after it.
    """
    n_cached = backend.length(0)
    logits = backend.decode(Batch.of(text[n_cached:], n_cached, n_last))  # float32[n_last, n_vocab]
    if temperature <= 0.0:
        probs = np.zeros(logits.shape)
        probs[np.arange(n_last), logits.argmax(axis=1)] = 1.0
        return probs
    scores = logits.astype(np.float64) / temperature
    weights: ProbArray = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def sample(probs: ProbArray, rng: np.random.Generator) -> int:
    """Sample a token from float64[n_vocab]."""
    return int(rng.choice(len(probs), p=probs))


def generate(
    target: Backend,
    draft: Backend,
    prompt: Sequence[int],
    rng: np.random.Generator,
    *,
    temperature: float = 0.0,
    n_draft: int = N_DRAFT,
    max_tokens: int = MAX_TOKENS,
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, until the text ends or a limit is reached.

    There are at most `max_tokens`, and only as many as the target's context has room for. Both
    caches must be empty, and the draft's must be at least as large as the target's.
    """
    prefill(target, prompt[:-1])
    prefill(draft, prompt[:-1])
    text = list(prompt)
    # The last token of the text is not decoded, so it needs no cell of the cache.
    max_length = min(len(prompt) + max_tokens, target.n_ctx + 1)
    while len(text) < max_length:
        n_room = max_length - len(text) - 1  # without the token that the target adds
        new_tokens = speculative_round(target, draft, text, min(n_draft, n_room), temperature, rng)
        for token in new_tokens:
            if target.vocabulary.is_end(token):
                return
            text.append(token)
            yield token


def prefill(backend: Backend, tokens: Sequence[int]) -> None:
    """Decode the beginning of a prompt into an empty cache, one batch at a time."""
    for start in range(0, len(tokens), backend.n_batch):
        backend.decode(Batch.of(tokens[start : start + backend.n_batch], start))


@contextmanager
def opened(file: Path) -> Iterator[LlamaBackend]:
    """Load a model, and open a context with room for the logits of a whole round."""
    with closing(LlamaModel(file)) as model:
        backend = LlamaBackend(
            model,
            ContextOptions(),
            n_ctx=N_CTX,
            n_outputs=N_DRAFT + 1,
            clock=time.perf_counter,
        )
        with closing(backend):
            yield backend


def write_continuation(
    target: LlamaBackend,
    draft: LlamaBackend,
    prompt: str,
    temperature: float,
    seed: int,
) -> None:
    """Write the continuation of a prompt to stdout while it is generated.

    Raises:
        PairError: If the two models have different vocabularies.
        PromptError: If the prompt is empty.
    """
    vocabulary = target.vocabulary
    if list(vocabulary.token_entries()) != list(draft.vocabulary.token_entries()):
        raise PairError(
            f"{draft.model.name} and {target.model.name} differ in their vocabularies; "
            "use a draft model of the target's family"
        )
    tokens = vocabulary.tokenize(prompt, add_special=True, parse_special=False)
    if not tokens:
        raise PromptError("the prompt is empty")
    rng = np.random.default_rng(seed)
    for token in generate(target, draft, tokens, rng, temperature=temperature):
        sys.stdout.buffer.write(vocabulary.token_bytes(token))
        sys.stdout.buffer.flush()
    sys.stdout.buffer.write(b"\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program with these arguments; None: those of the command line."""
    parser = argparse.ArgumentParser(description="Speculative sampling in its plainest form.")
    parser.add_argument("target", type=Path, help="the GGUF file of the model to sample from")
    parser.add_argument("draft", type=Path, help="a smaller model with the same vocabulary")
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers")
    given = parser.parse_args(arguments)
    try:
        start_kernels(KernelOptions())
        with opened(given.target) as target, opened(given.draft) as draft:
            write_continuation(target, draft, given.prompt, given.temperature, given.seed)
    except SpecgenError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
