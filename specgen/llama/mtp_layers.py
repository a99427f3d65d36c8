"""Whether a file has multi-token prediction (MTP) layers that can draft.

MTP layers stand behind the last layer of a model, and were trained with it. From a token and the model's
hidden state before that token they predict the next one (DeepSeek-V3, arXiv:2412.19437, section 2.2). GGUF
files call them NextN.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from specgen.errors import BackendError
from specgen.llama.gguf_metadata import GgufMetadata, parts_of

#: The architectures whose MTP layers llama.cpp computes.
ARCHITECTURES = frozenset(
    {
        "bailingmoe3",
        "cohere2moe",
        "deepseek2",
        "deepseek32",
        "deepseek4",
        "glm-dsa",
        "glm4moe",
        "hy_v3",
        "mimo2",
        "nemotron_h_moe",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "step35",
    }
)
#: Those with more than one MTP layer: each drafts one token.
SEVERAL_LAYERS = frozenset({"hy_v3", "mimo2", "step35"})
#: Those whose graph gives hidden states only for the rows that want logits.
WANTED_ROWS_ONLY = frozenset({"deepseek4", "mimo2", "qwen3next", "step35"})


def why_no_mtp(path: Path) -> str:
    """Return why the MTP layers of a file cannot draft; empty if they can."""
    with ExitStack() as resources:
        try:
            parts = [GgufMetadata(resources, part) for part in parts_of(path)]
        except BackendError:
            return "it is not a GGUF file"
        architecture = parts[0].text("general.architecture")
        n_layers = parts[0].number(f"{architecture}.nextn_predict_layers")
        if not n_layers:
            return "it has no MTP layers"
        names = {tensor.name for part in parts for tensor in part.tensors()}
    if not any(".nextn." in name for name in names):
        return "its MTP layers were removed from the file"
    if "token_embd.weight" not in names:
        return "it has only MTP layers, and not the model that they belong to"
    if architecture not in ARCHITECTURES:
        return f"llama.cpp does not compute the MTP layers of its architecture ({architecture})"
    if n_layers > 1 and architecture not in SEVERAL_LAYERS:
        return f"llama.cpp computes a single MTP layer of its architecture ({architecture}), not {n_layers}"
    return ""
