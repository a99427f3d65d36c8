"""The complete list of known failures of architectures, with the reasons.

`make architectures` fails if a check fails that is not listed here, or if a listed check passes.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("f32", "q4_k")
WHO = ("specgen", "llama.cpp")


@dataclass(frozen=True, slots=True)
class KnownException:
    """Checks that fail for some architectures.

    `operator` names what of a model makes its rows depend on a batch, in llama.cpp's words.
    """

    names: tuple[str, ...]
    checks: tuple[str, ...]
    reason: str
    operator: str = ""
    by: tuple[str, ...] = WHO


def _known(
    names: str, checks: str, reason: str, operator: str = "", by: str = ""
) -> KnownException:
    who = (by,) if by else WHO
    return KnownException(tuple(names.split()), tuple(checks.split(", ")), reason, operator, who)


_TWO_SEQUENCES = "llama.cpp is wrong for two sequences of several tokens in a batch"
#: `make`: llama.cpp cannot create the model that its tests describe. `load`: it does not generate
#: text.
EXCEPTIONS: tuple[KnownException, ...] = (
    _known(
        "clip gemma4-assistant eagle3 dflash",
        "make",
        "not a model of its own: a part of another one",
    ),
    _known(
        "bert nomic-bert nomic-bert-moe jina-bert-v2 jina-bert-v3", "make", "an embedding model"
    ),
    _known("gptj", "make", "llama.cpp does not run it"),
    _known("graniteswitch", "make", "needs adapters, which the tests do not create"),
    _known("modern-bert neo-bert eurobert gemma-embedding", "load", "an embedding model"),
    _known("t5 t5encoder", "load", "an encoder, or an encoder-decoder"),
    _known("dream llada llada-moe-moe rnd1-moe", "load", "a diffusion model"),
    _known("wavtokenizer-dec", "load", "an audio decoder"),
    _known("plm", "load", "llama.cpp aborts because of the shape of its values (ggml_set_rows)"),
    _known(
        "plamo2",
        "four sequences, fuzz",
        "llama.cpp is wrong for two sequences in a batch, or aborts",
        "ssm_scan",
    ),
    _known("arwkv7", "four sequences, fuzz", _TWO_SEQUENCES, "token_shift"),
    _known("rwkv6qwen2", "four sequences, fuzz", _TWO_SEQUENCES, "token_shift"),
    _known(
        "cogvlm",
        "four sequences, rows",
        "llama.cpp returns the first rows of a batch instead of those that need logits",
        "inp_out_ids",
        by="specgen",
    ),
    _known(
        "minimax-01-moe",
        "four sequences, fuzz",
        "llama.cpp's kernels abort for two sequences in a batch (a 4-D product)",
        "mul_mat",
        by="llama.cpp",
    ),
    _known(
        "minicpm3 phimoe-moe",
        "four sequences",
        "llama.cpp rotates keys by the size of the whole context, which all answers share",
        "rope factors",
    ),
    _known(
        "minimax-01-moe",
        "rows",
        "the decay of its lightning attention",
        "q_decay_exp",
        by="specgen",
    ),
    _known(
        "chameleon",
        "n-gram, model, wrong draft, tree, full context, four sequences, rows, fuzz",
        "llama.cpp masks image tokens in the first row of a batch only",
        "img_logits",
    ),
    _known(
        "qwen3tts",
        "wrong draft",
        "the random model generates tokens that are missing from the draft's vocabulary",
    ),
)


def exception_for(name: str, who: str, check: str) -> KnownException | None:
    """The exception that covers a check; one of `load` covers all checks."""
    covering = (
        each
        for each in EXCEPTIONS
        if name in each.names and who in each.by
        if check in each.checks or "load" in each.checks
    )
    return next(covering, None)
