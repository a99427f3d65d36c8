"""The files of drafts that read what their target computes: EAGLE-3, DFlash and DSpark, Gemma 4
assistants, MTP layers.

EAGLE-3 (Li et al., arXiv:2503.01840) is a layer that reads the inputs of three of its target's
layers, of which its *encoder*, a matrix, makes one hidden state. DFlash (Chen et al.,
arXiv:2602.06036) reads the inputs of some layers, too, and predicts a block of tokens at once. An
assistant is a few layers without keys and values, which attend to those of the target's last two
layers. MTP layers read its last hidden state.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import ClassVar

from specgen.errors import ModelFileError, PairError
from specgen.llama.gguf_file import GgufMetadata
from specgen.llama.library import llama_cpp
from specgen.llama.model import LlamaModel
from specgen.options import CacheType

#: The architectures whose graphs hand out the inputs of layers: llama.cpp ends the process with
#: others.
HOOKED = frozenset(
    (
        *("bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2"),
        *("lfm2moe", "llama", "mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige"),
        *("nemotron_h", "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next"),
    )
)
#: Those that also hand out what the last layer made.
_LAST = frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"})
#: The size of DFlash's block, if the file does not say it.
_USUAL_BLOCK = 16


class DraftModel(LlamaModel):
    """A draft made for one target. Raises `ModelFileError`, and `PairError` if it was made for
    another one.
    """

    #: What it is called in messages, and whether the file's MTP layers are loaded.
    kind: ClassVar[str]
    loads_mtp: ClassVar[bool] = False

    def __init__(self, path: Path, target: LlamaModel, *, n_gpu_layers: int = -1) -> None:
        super().__init__(path, n_gpu_layers=n_gpu_layers, mtp=self.loads_mtp)
        try:
            self._read_file()
            if target.is_remote or not target.n_layer:  # or only its vocabulary is loaded
                where = "on workers (--rpc)" if target.is_remote else "elsewhere"
                why = f"{self.kind} reads the target's layers, which are computed {where}"
                raise self._misfit(target, why)
            self._check_target(target)
        except (ModelFileError, PairError):
            self.close()
            raise

    def _read_file(self) -> None:
        pass

    def _check_target(self, target: LlamaModel) -> None:
        raise NotImplementedError

    def _misfit(self, target: LlamaModel, why: str) -> PairError:
        return PairError(
            f"{self.name} cannot draft for {target.name}: {why}",
            f"take a draft that was made for {target.name}, or --draft ngram, which fits every model",
        )

    def _check_states(self, target: LlamaModel, n_read: int, n_given: int) -> None:
        if n_read != n_given:
            why = f"it reads hidden states of {n_read} values, the target's have {n_given}"
            raise self._misfit(target, why)


class MtpModel(DraftModel):
    """The MTP layers of a target, loaded from a file of their own."""

    kind = "MTP"
    loads_mtp = True

    def _check_usable(self) -> None:
        if self.why_no_mtp:
            raise ModelFileError(f"{self.path}: {self.why_no_mtp}")

    def _check_target(self, target: LlamaModel) -> None:
        if self.architecture != target.architecture:
            why = f"its MTP layers are of a {self.architecture}, not of a {target.architecture}"
            raise self._misfit(target, why)
        self._check_states(target, self.n_embd_out, target.n_embd_out)


class TrainedModel(DraftModel):
    """A draft with an architecture of its own, which reads the inputs of some of the target's
    layers.
    """

    file_architecture: ClassVar[str]
    #: Whether it may read what the last layer made, as if a further layer read it.
    reads_last: ClassVar[bool] = False
    #: The target's layers whose inputs it reads, and the number of their values together.
    layers: tuple[int, ...] = ()
    n_read = 0

    def _check_usable(self) -> None:
        if self.architecture != self.file_architecture:
            raise ModelFileError(f"{self.path}: not a draft of the kind {self.kind}")

    def _read_file(self) -> None:
        with GgufMetadata(self.file) as about:
            key = f"{self.architecture}.target_layers"
            self.layers = tuple(about.array(key, ctypes.c_int32))
            self._tensors = {tensor.name for tensor in about.tensors()}

    def _check_target(self, target: LlamaModel) -> None:
        if target.architecture not in HOOKED:
            why = (
                f"does not hand out the layers' inputs of this architecture ({target.architecture})"
            )
            raise self._misfit(target, f"llama.cpp {why}, which {self.kind} reads")
        self._check_states(target, self._n_target(), target.n_embd)
        self.n_read = len(self.layers) * target.n_embd
        n_layers = target.n_layer + (self.reads_last and target.architecture in _LAST)
        if not all(0 <= layer < n_layers for layer in self.layers):
            named = ", ".join(map(str, self.layers))
            raise self._misfit(target, f"it reads layers {named}, the target has {target.n_layer}")
        lacks = {"token_embd.weight": "embeddings", "output.weight": "an output matrix"}
        shared = [what for name, what in lacks.items() if name not in self._tensors]
        if "d2t" in self._tensors and "output.weight" not in self._tensors:
            why = f"{self.path}: damaged: there is no output matrix"
            raise ModelFileError(why, "fetch the file again")
        if shared and self.n_embd != target.n_embd:
            sizes = f"have {self.n_embd} values, the target's {target.n_embd}"
            lacking = " and ".join(shared)
            raise self._misfit(target, f"it lacks {lacking}, and its hidden states {sizes}")

    def _n_target(self) -> int:
        return self.number("target_hidden_size")


class EagleModel(TrainedModel):
    """A loaded EAGLE-3 draft."""

    file_architecture = "eagle3"
    kind = "EAGLE-3"


class DflashModel(TrainedModel):
    """A loaded DFlash or DSpark draft. Raises `ModelFileError` also if it is of a kind that specgen
    cannot use.
    """

    file_architecture = "dflash"
    kind = "DFlash"
    reads_last = True

    def _n_target(self) -> int:
        return self.n_embd

    def _read_file(self) -> None:
        super()._read_file()
        #: Whether each prediction depends on the one before (DSpark).
        self.is_chained = "markov_w1.weight" in self._tensors
        #: The token that stands for one that is to be predicted.
        self.mask = int(llama_cpp.llama_vocab_mask(self.vocabulary.handle))
        from_anchor = self.metadata("dflash.sample_from_anchor") != "false"
        #: Whether the row of the last token predicts too, or only those of masks do.
        self.predicts_from_last = self.is_chained and from_anchor
        n_block = self.number("block_size") or _USUAL_BLOCK
        #: The most tokens of a draft.
        self.n_most = n_block - (not self.predicts_from_last)
        problem = ""
        if "selector_hidden.weight" in self._tensors:
            problem = "a DFlash 2 draft, which specgen cannot use yet"
        elif self.number("hyper_connection.count"):
            problem = "a DSpark draft of DeepSeek V4, which specgen cannot use yet"
        elif self.mask < 0:
            problem = "damaged: there is no mask token"
        elif self.n_most < 1:
            problem = f"damaged: blocks of {n_block} tokens"
        if problem:
            raise ModelFileError(f"{self.path}: {problem}")


class AssistantModel(TrainedModel):
    """A loaded Gemma 4 assistant: llama.cpp would end the process with another target."""

    file_architecture = "gemma4-assistant"
    kind = "a Gemma 4 assistant"

    def cache_bytes(self, n_ctx: int, type_k: CacheType, type_v: CacheType) -> int:
        return 0

    def _read_file(self) -> None:
        self.n_window = 0  # it has no cells of its own that a rollback could miss

    def _check_target(self, target: LlamaModel) -> None:
        if target.architecture != "gemma4":
            why = f"{self.kind} drafts for Gemma 4, and not for {target.architecture}"
            raise self._misfit(target, why)
        self._check_states(target, self.n_embd_out, target.n_embd)
        own, others = _shapes(self), _shapes(target)[-2:]
        # Its layers with a window read the last layer but one, the others read the last.
        if [is_windowed for is_windowed, *_ in others] != [True, False] or not {*own} <= {*others}:
            why = "the keys of the target's last two layers do not fit its layers"
            raise self._misfit(target, why)


def _shapes(model: LlamaModel) -> list[tuple[bool, int, int]]:
    """Return for each layer whether it has a sliding window, the number of its heads of keys, and
    their size.
    """
    prefix = f"{model.architecture}.attention"
    with GgufMetadata(model.file) as about:
        sizes = [about.number(f"{prefix}.key_length{end}") for end in ("", "_swa")]
        n_heads = about.number(f"{prefix}.head_count_kv")
        windows = about.array(f"{prefix}.sliding_window_pattern", ctypes.c_bool)
        heads = about.array(f"{prefix}.head_count_kv", ctypes.c_int32)
    heads = heads or [n_heads] * len(windows)
    return [
        (bool(is_windowed), int(n), sizes[bool(is_windowed)])
        for is_windowed, n in zip(windows, heads, strict=False)
    ]
