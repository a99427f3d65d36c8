"""Models in the form of Ollama's API: ``/api/tags``, ``/api/ps`` and ``/api/show``.

Typed clients, such as those in Swift and Go, require every field with its type. A field about which
nothing is known is empty.
"""

from __future__ import annotations

import datetime
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specgen.llama.model_description import ModelDescription
from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.fields import Json

#: The time at which models are unloaded that stay loaded until another one needs their memory.
_NEVER = "2999-12-31T23:59:59+00:00"
#: Ollama's names of options, in the order in which it shows them.
_SHOWN_SAMPLERS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """The description of one of a server's models."""

    name: str
    description: ModelDescription
    #: What it can do, in Ollama's words; None if that is unknown, since it is not loaded.
    capabilities: Sequence[str] | None = None
    #: Its chat template; empty if it has none.
    template: str = ""
    #: The size of its context in the server, in tokens.
    n_ctx: int = 0
    #: The defaults of its answers.
    sampler: SamplerOptions = SamplerOptions()
    generation: GenerationOptions = GenerationOptions()

    def listed(self) -> Json:
        """Return its entry in the list of all models."""
        entry = {
            **self._identity(),
            "size": self.description.n_bytes,
        }
        if self.capabilities is not None:
            entry["capabilities"] = list(self.capabilities)
        return entry

    def running(
        self,
        n_bytes: int,
        n_gpu_bytes: int,
        remaining_s: float,
    ) -> Json:
        """Return its entry in the list of loaded models.

        Args:
            n_bytes: The memory that it needs.
            n_gpu_bytes: How much of that is on a GPU.
            remaining_s: After how many seconds it will be unloaded; infinity for no limit.
        """
        expires_at = _NEVER
        if math.isfinite(remaining_s):
            expires_at = timestamp(time.time() + remaining_s)
        return {
            **self._identity(),
            "size": n_bytes,
            "size_vram": n_gpu_bytes,
            "expires_at": expires_at,
            "context_length": self.n_ctx,
        }

    def shown(self) -> Json:
        """Return all that is known about it."""
        architecture = self.description.architecture
        own_info = {
            "general.architecture": architecture,
            "general.basename": self.name,
            "general.parameter_count": self.description.n_parameters,
            # Clients shorten conversations to this size.
            f"{architecture}.context_length": self.n_ctx,
        }
        return {
            "license": self.description.license,
            "modelfile": self._modelfile(),
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in self._parameters()),
            "template": self.template,
            "system": "",
            "details": self._details(),
            "model_info": {**self.description.metadata, **own_info},
            "capabilities": list(self.capabilities or ()),
            "modified_at": self._modified_at(),
        }

    def _identity(self) -> Json:
        return {
            "name": self.name,
            "model": self.name,
            "modified_at": self._modified_at(),
            "digest": self.description.digest,
            "details": self._details(),
        }

    def _details(self) -> Json:
        description = self.description
        return {
            "parent_model": "",
            "format": "gguf",
            "family": description.architecture,
            "families": [description.architecture],
            "parameter_size": _rounded(description.n_parameters),
            "quantization_level": description.weight_type,
            "context_length": self.n_ctx,
            "embedding_length": description.n_embd,
        }

    def _modified_at(self) -> str:
        return timestamp(self.description.modified_s)

    def _parameters(self) -> list[tuple[str, Any]]:
        """Return the defaults of a request's options, with Ollama's names.

        A random seed and an unlimited length, which are both -1, are left out, as Ollama does: some
        clients copy all parameters into their settings, and refuse to save a length of -1.
        """
        parameters: list[tuple[str, Any]] = [("num_ctx", self.n_ctx)]
        parameters += ((name, getattr(self.sampler, name)) for name in _SHOWN_SAMPLERS)
        parameters.append(("num_predict", self.generation.max_tokens))
        parameters += (("stop", json.dumps(text)) for text in self.generation.stop)
        return [(name, value) for name, value in parameters if value != -1]

    def _modelfile(self) -> str:
        """Return a file with which Ollama would make a model like this one."""
        lines = [f"FROM {self.name}"]
        if self.template:
            lines.append(f'TEMPLATE """{self.template}"""')
        lines += (f"PARAMETER {name} {value}" for name, value in self._parameters())
        return "\n".join(lines)


def timestamp(seconds: float) -> str:
    """Return a time in seconds since 1970 as Ollama writes it."""
    return datetime.datetime.fromtimestamp(int(seconds), datetime.timezone.utc).isoformat()


def _rounded(number: int) -> str:
    """Return a number of parameters as Ollama writes it: ``1.8B``, ``134.52M``, ``30K``."""
    if number >= 1e9:
        return f"{number / 1e9:.1f}".removesuffix(".0") + "B"
    if number >= 1e6:
        return f"{number / 1e6:.2f}".removesuffix(".00") + "M"
    if number >= 1e3:
        return f"{number / 1e3:.0f}K"
    return str(number)
