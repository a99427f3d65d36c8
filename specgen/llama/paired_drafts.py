"""Draft models that are made for one target, since they read its hidden states.

- *MTP layers* read its last hidden state.
- *EAGLE-3* (Li et al., arXiv:2503.01840) is a layer that reads the inputs of three of the target's
  layers. Its *encoder*, a matrix, turns them into one hidden state.
- *DFlash* and *DSpark* (Chen et al., arXiv:2602.06036) also read the inputs of some layers, and
  predict a block of tokens at once.
- A *Gemma 4 assistant* has a few layers without keys and values of their own. They attend to those
  of the target's last two layers.

Each class checks that a file is such a draft, and that it fits its target.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NamedTuple

from specgen.errors import ModelFileError, PairError
from specgen.llama.library import llama_cpp
from specgen.llama.model import LlamaModel
from specgen.llama.model_description import describe_model
from specgen.options import CacheType

#: The architectures for which llama.cpp can return the inputs of layers. For others it ends the
#: process.
HOOKED = frozenset(
    (
        *("bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2"),
        *("lfm2moe", "llama", "mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige"),
        *("nemotron_h", "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next"),
    )
)
#: The architectures for which it can also return the output of the last layer.
_HANDS_OUT_LAST_OUTPUT = frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"})
#: The number of tokens in DFlash's blocks, if the file does not contain it.
_DEFAULT_BLOCK = 16
#: The tensors that a draft takes from its target if its file lacks them, with their descriptions.
_SHARED_TENSORS = {"token_embd.weight": "embeddings", "output.weight": "an output matrix"}


class PairedDraftModel(LlamaModel):
    """A draft model that is made for one target."""

    #: Its name in messages.
    kind: ClassVar[str]
    #: Whether the MTP layers of its file are loaded.
    loads_mtp: ClassVar[bool] = False

    def __init__(
        self,
        path: Path,
        target: LlamaModel,
        *,
        n_gpu_layers: int = -1,
    ) -> None:
        """Load a draft.

        Raises:
            ModelFileError: If the file is not such a draft.
            PairError: If the draft was made for another target.
        """
        super().__init__(path, n_gpu_layers=n_gpu_layers, mtp=self.loads_mtp)
        try:
            self._read_file()
            self._check_decodes_here(target)
            self._check_target(target)
        except BaseException:
            self.close()
            raise

    def _read_file(self) -> None:
        """Read the draft's properties from the metadata of its file."""

    def _check_decodes_here(self, target: LlamaModel) -> None:
        """Raise `PairError` if the target's hidden states are not computed in this process."""
        reads = f"{self.kind} reads the target's layers, which are computed"
        if target.is_remote:
            raise self._misfit(target, f"{reads} on workers (--rpc)")
        if not target.n_layer:  # only its vocabulary is loaded
            raise self._misfit(target, f"{reads} elsewhere")

    def _check_target(self, target: LlamaModel) -> None:
        """Raise `PairError` if the draft was made for another target."""
        raise NotImplementedError

    def _check_hidden_size(
        self,
        target: LlamaModel,
        n_read: int,
        n_given: int,
    ) -> None:
        if n_read != n_given:
            raise self._misfit(
                target, f"it reads hidden states of {n_read} values, the target's have {n_given}"
            )

    def _misfit(self, target: LlamaModel, why: str) -> PairError:
        return PairError(
            f"{self.name} cannot draft for {target.name}: {why}",
            f"use a draft that was made for {target.name}, "
            "or --draft ngram, which works with every model",
        )


class MtpModel(PairedDraftModel):
    """The MTP layers of a target, in a file of their own."""

    kind = "MTP"
    loads_mtp = True

    def _check_usable(self) -> None:
        if self.why_no_mtp:
            raise ModelFileError(f"{self.path}: {self.why_no_mtp}")

    def _check_target(self, target: LlamaModel) -> None:
        if self.architecture != target.architecture:
            raise self._misfit(
                target,
                f"its MTP layers are of a {self.architecture}, not of a {target.architecture}",
            )
        self._check_hidden_size(target, self.n_embd_out, target.n_embd_out)


class TrainedDraftModel(PairedDraftModel):
    """A draft that was trained for its target, and has an architecture of its own."""

    #: The architecture in the metadata of its file.
    file_architecture: ClassVar[str]
    #: The target's layers whose inputs it reads.
    layers: tuple[int, ...] = ()

    def _check_usable(self) -> None:
        if self.architecture != self.file_architecture:
            raise ModelFileError(f"{self.path}: not a draft of the kind {self.kind}")


class LayerInputDraftModel(TrainedDraftModel):
    """A draft that reads the inputs of some of its target's layers."""

    #: Whether it may read the output of the last layer, as the input of a further layer.
    reads_last_output: ClassVar[bool] = False

    def _read_file(self) -> None:
        described = describe_model(self.file)
        self.layers = tuple(described.numbers("target_layers"))
        self._tensors = described.tensors.keys()

    def _check_target(self, target: LlamaModel) -> None:
        if target.architecture not in HOOKED:
            raise self._misfit(
                target,
                "llama.cpp does not hand out the layers' inputs of this architecture "
                f"({target.architecture}), which {self.kind} reads",
            )
        self._check_hidden_size(target, self._target_hidden_size(), target.n_embd)
        self._check_layers(target)
        self._check_tensors(target)

    def _target_hidden_size(self) -> int:
        """Return the size of the target's hidden states that the draft was made for."""
        return self.number("target_hidden_size")

    def _check_layers(self, target: LlamaModel) -> None:
        """Raise `PairError` if the draft reads layers that the target does not have."""
        n_layers = target.n_layer
        if self.reads_last_output and target.architecture in _HANDS_OUT_LAST_OUTPUT:
            n_layers += 1
        if not all(0 <= layer < n_layers for layer in self.layers):
            named = ", ".join(map(str, self.layers))
            raise self._misfit(target, f"it reads layers {named}, the target has {target.n_layer}")

    def _check_tensors(self, target: LlamaModel) -> None:
        """Check that the draft can take the tensors that its file lacks from the target.

        Raises:
            ModelFileError: If a vocabulary of its own ("d2t") has no output matrix.
            PairError: If the target's tensors have another size.
        """
        if "d2t" in self._tensors and "output.weight" not in self._tensors:
            raise ModelFileError(
                f"{self.path}: damaged: there is no output matrix", "fetch the file again"
            )
        missing = [
            description
            for name, description in _SHARED_TENSORS.items()
            if name not in self._tensors
        ]
        if missing and self.n_embd != target.n_embd:
            raise self._misfit(
                target,
                f"it lacks {' and '.join(missing)}, and its hidden states have "
                f"{self.n_embd} values, the target's {target.n_embd}",
            )


class EagleModel(LayerInputDraftModel):
    """A loaded EAGLE-3 draft."""

    file_architecture = "eagle3"
    kind = "EAGLE-3"


class DflashModel(LayerInputDraftModel):
    """A loaded DFlash or DSpark draft."""

    file_architecture = "dflash"
    kind = "DFlash"
    reads_last_output = True

    #: Whether each prediction depends on the one before it (DSpark).
    is_chained: bool
    #: Whether the row of the last token also predicts a token, and not only the rows of masks.
    predicts_from_last: bool
    #: The token that stands for one to be predicted.
    mask: int
    #: The maximum number of tokens of a draft.
    n_max: int

    def _read_file(self) -> None:
        """Read the size and the kind of its blocks.

        Raises:
            ModelFileError: If the file is damaged, or of a kind that specgen cannot use.
        """
        super()._read_file()
        self.is_chained = "markov_w1.weight" in self._tensors
        # The anchor of a block is its first row, which has the last token of the text.
        samples_from_anchor = self.metadata("dflash.sample_from_anchor") != "false"
        self.predicts_from_last = self.is_chained and samples_from_anchor
        self.mask = int(llama_cpp.llama_vocab_mask(self.vocabulary.handle))
        n_block = self.number("block_size") or _DEFAULT_BLOCK
        self.n_max = n_block if self.predicts_from_last else n_block - 1

        problem = ""
        if "selector_hidden.weight" in self._tensors:
            problem = "a DFlash 2 draft, which specgen cannot use yet"
        elif self.number("hyper_connection.count"):
            problem = "a DSpark draft of DeepSeek V4, which specgen cannot use yet"
        elif self.mask < 0:
            problem = "damaged: there is no mask token"
        elif self.n_max < 1:
            problem = f"damaged: blocks of {n_block} tokens"
        if problem:
            raise ModelFileError(f"{self.path}: {problem}")

    def _target_hidden_size(self) -> int:
        return self.n_embd


class AssistantModel(TrainedDraftModel):
    """A loaded Gemma 4 assistant. With a target that does not fit, llama.cpp ends the process."""

    file_architecture = "gemma4-assistant"
    kind = "a Gemma 4 assistant"

    def cache_bytes(
        self,
        n_ctx: int,
        type_k: CacheType,
        type_v: CacheType,
    ) -> int:
        """Return 0: it reads the target's cells."""
        return 0

    def _read_file(self) -> None:
        self.n_window = 0  # it has no cells of its own that a rollback could miss

    def _check_target(self, target: LlamaModel) -> None:
        if target.architecture != "gemma4":
            raise self._misfit(
                target, f"{self.kind} drafts for Gemma 4, and not for {target.architecture}"
            )
        self._check_hidden_size(target, self.n_embd_out, target.n_embd)
        # Its layers with a sliding window read the target's last layer but one, the others its last
        # layer. So these must be such layers, with keys of the same shape.
        last_two = _key_shapes(target)[-2:]
        are_windowed = [layer.is_windowed for layer in last_two]
        if are_windowed != [True, False] or not set(_key_shapes(self)) <= set(last_two):
            raise self._misfit(
                target, "the keys of the target's last two layers do not fit its layers"
            )


class _KeyShape(NamedTuple):
    """The shape of the keys of a layer's attention."""

    #: Whether the layer has a sliding window.
    is_windowed: bool
    #: The number of heads of keys.
    n_heads: int
    #: The size of a key.
    head_size: int


def _key_shapes(model: LlamaModel) -> list[_KeyShape]:
    """Return the shape of each layer's keys, as the file describes it."""
    described = describe_model(model.file)
    full_size = described.number("attention.key_length")
    windowed_size = described.number("attention.key_length_swa")
    windows = described.numbers("attention.sliding_window_pattern")
    n_heads = described.numbers("attention.head_count_kv")
    if not n_heads:  # one number for all layers
        n_heads = [described.number("attention.head_count_kv")] * len(windows)
    return [
        _KeyShape(bool(is_windowed), n, windowed_size if is_windowed else full_size)
        for is_windowed, n in zip(windows, n_heads, strict=False)
    ]
