"""Tiny models that generate a given text, and the answers that the server makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specgen.options import DraftSource
from specgen.serve.formats.model_adaptation import with_call_form
from specgen.serve.formats.single_request import read_request
from tests.helpers.common import NOW
from tests.helpers.server import running, session_of
from tests.helpers.sessions import opened
from tests.tiny import TinyConfig
from tests.tiny.file import add_tokenizer, write_and_close
from tests.tiny.vocabulary import tiny_vocabulary

_WIDTH, _N_CTX = 512, 4096


def write_scripted_model(
    path: Path, config: TinyConfig, tokens: Sequence[int] = (), start: int = 1
) -> Path:
    """Write a model that generates these tokens after a prompt of `start` tokens, and then the end.

    All other tokens are equally likely. Its single layer does nothing, and each position has its
    own embedding.
    """
    from gguf import GGUFWriter

    vocabulary = tiny_vocabulary(config)
    n_vocab = len(vocabulary)
    writer = GGUFWriter(path, "gpt2")
    writer.add_name("scripted")
    writer.add_vocab_size(n_vocab)
    writer.add_context_length(_N_CTX)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-5)
    add_tokenizer(writer, config, vocabulary)
    positions = np.zeros((_N_CTX, _WIDTH), np.float32)
    output = np.zeros((n_vocab, _WIDTH), np.float32)
    for k, token in enumerate([*tokens, vocabulary.eot]):
        positions[start - 1 + k, k] = 1.0
        output[token, k] = 30.0
    zeros = {
        "attn_norm.bias": (_WIDTH,),
        "attn_qkv.weight": (3 * _WIDTH, _WIDTH),
        "attn_qkv.bias": (3 * _WIDTH,),
        "attn_output.weight": (_WIDTH, _WIDTH),
        "attn_output.bias": (_WIDTH,),
        "ffn_norm.bias": (_WIDTH,),
        "ffn_up.weight": (32, _WIDTH),
        "ffn_up.bias": (32,),
        "ffn_down.weight": (_WIDTH, 32),
        "ffn_down.bias": (_WIDTH,),
    }
    ones = np.ones(_WIDTH, np.float32)
    tensors: dict[str, Any] = {
        "token_embd.weight": np.zeros((n_vocab, _WIDTH), np.float32),
        "position_embd.weight": positions,
        "output.weight": output,
        "output_norm.bias": np.zeros(_WIDTH, np.float32),
        "blk.0.attn_norm.weight": ones,
        "blk.0.ffn_norm.weight": ones,
        **{f"blk.0.{name}": np.zeros(shape, np.float32) for name, shape in zeros.items()},
        # The last one, since a file that ends with zeros is taken for an unfinished download.
        "output_norm.weight": ones,
    }
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    write_and_close(writer)
    return path


def write_model_that_says(
    target: Path, template: str, text: str, body: dict[str, Any], controls: Sequence[str] = ()
) -> Path:
    """Write a model that prefers to answer a chat with this text, and a draft that does so, too."""
    config = TinyConfig(chat_template=template, control_tokens=tuple(controls), add_bos=False)
    write_scripted_model(target, config)
    with opened(target) as session:
        asked = read_request("chat", body)
        asked = with_call_form(asked, template, session.target.vocabulary.has_control)
        n_prompt = len(asked.prompt(session.prompts, NOW).tokens)
        tokens = session.target.vocabulary.tokenize(text, add_special=False, parse_special=True)
    write_scripted_model(target.parent / "draft.gguf", config, tokens, n_prompt)
    return write_scripted_model(target, config, tokens, n_prompt)


def asked_of(
    folder: Path,
    template: str,
    text: str,
    body: dict[str, Any],
    *,
    controls: Sequence[str] = (),
    draft: str = "none",
) -> dict[str, Any]:
    """The server's answer to a chat with a model that prefers a text.

    `draft` may be "same", which is a draft model that prefers the same text.
    """
    target = write_model_that_says(folder / "target.gguf", template, text, body, controls)
    source: DraftSource = folder / "draft.gguf" if draft == "same" else draft
    session = session_of(target, source, max_tokens=400)
    with running(session, n_parallel=1, n_ctx=2048) as server:
        found: dict[str, Any] = server.post("/v1/chat/completions", **body).json()
    return found
