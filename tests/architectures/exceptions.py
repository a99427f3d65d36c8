"""What does not work, by name and with the reason: the only list of it.

`make architectures` fails where something fails that is not listed here, and where something listed
works.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("f32", "q4_k")
WHO = ("specgen", "llama.cpp")
CHECKS_WITH_DRAFTS = (
    *("n-gram", "model", "wrong draft", "tree", "full context", "four sequences", "rows", "fuzz"),
)


@dataclass(frozen=True, slots=True)
class KnownException:
    """Checks that fail for some architectures.

    `operator` names what of a model makes its rows depend on a batch, in llama.cpp's words.
    """

    names: tuple[str, ...]
    checks: tuple[str, ...]
    reason: str
    operator: str = ""
    kinds: tuple[str, ...] = KINDS
    by: tuple[str, ...] = WHO


#: `make`: llama.cpp makes no model of the shape that its tests know. `load`: it does not generate text.
EXCEPTIONS: tuple[KnownException, ...] = (
    KnownException(
        ("clip", "gemma4-assistant", "eagle3", "dflash"),
        ("make",),
        "no model of its own: a part of another one",
    ),
    KnownException(
        ("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3"),
        ("make",),
        "an embedding model",
    ),
    KnownException(("gptj",), ("make",), "llama.cpp does not run it"),
    KnownException(("graniteswitch",), ("make",), "needs adapters, which the tests do not make"),
    KnownException(
        ("modern-bert", "neo-bert", "eurobert", "gemma-embedding"),
        ("load",),
        "an embedding model",
    ),
    KnownException(("t5", "t5encoder"), ("load",), "an encoder, or with one"),
    KnownException(("dream", "llada", "llada-moe-moe", "rnd1-moe"), ("load",), "a diffusion model"),
    KnownException(("wavtokenizer-dec",), ("load",), "a decoder of sounds"),
    KnownException(
        ("plm",), ("load",), "llama.cpp aborts: the shape of its values (ggml_set_rows)"
    ),
    KnownException(
        ("plamo2",),
        ("four sequences", "fuzz"),
        "llama.cpp is wrong for two sequences in a batch, or aborts",
        operator="ssm_scan",
    ),
    KnownException(
        ("arwkv7",),
        ("four sequences", "fuzz"),
        "llama.cpp is wrong for two sequences of several tokens in a batch",
        operator="token_shift",
    ),
    KnownException(
        ("rwkv6qwen2",),
        ("four sequences", "fuzz"),
        "llama.cpp is wrong for two sequences of several tokens in a batch",
        operator="token_shift",
    ),
    KnownException(
        ("cogvlm",),
        ("four sequences", "rows"),
        "llama.cpp gives the first rows of a batch for those that want logits",
        operator="inp_out_ids",
        by=("specgen",),
    ),
    KnownException(
        ("minimax-01-moe",),
        ("four sequences", "fuzz"),
        "llama.cpp's own code aborts for two sequences in a batch: a 4-D product",
        operator="mul_mat",
        by=("llama.cpp",),
    ),
    KnownException(
        ("minicpm3", "phimoe-moe"),
        ("four sequences",),
        "llama.cpp turns keys by the size of the whole context, which is that of all answers",
        operator="rope factors",
    ),
    KnownException(
        ("minimax-01-moe",), ("rows",), "its decay", operator="q_decay_exp", by=("specgen",)
    ),
    KnownException(
        ("chameleon",),
        CHECKS_WITH_DRAFTS,
        "llama.cpp forbids tokens of images in the first row of a batch only",
        operator="img_logits",
    ),
    KnownException(
        ("qwen3tts",),
        ("wrong draft",),
        "the random model says tokens that the draft's vocabulary has not",
    ),
)


def exception_for(name: str, kind: str, who: str, check: str) -> KnownException | None:
    """The exception that covers a check; one of `load` covers all checks."""
    for each in EXCEPTIONS:
        if (
            name in each.names
            and (check in each.checks or "load" in each.checks)
            and kind in each.kinds
            and who in each.by
        ):
            return each
    return None
