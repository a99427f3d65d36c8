"""Answer prompts with one engine, in a process that keeps its model loaded.

    python benchmarks/engine_worker.py specgen

It reads JSON objects from stdin, one per line, and writes one line to stdout for each. The first is
the settings, and its answer describes the engine. The others are requests:

    {"prompt": "Hello", "tokens": [9707], "is_warm_up": false}

specgen applies its chat template to `prompt`; the other engines continue `tokens`. The fields of an
answer are named as in `specgen.FinishedEvent`; a failed answer has only `error`. The process ends
when its stdin is closed.

This file imports nothing but its engine, so it also runs in the environment of another engine, or
with another version of specgen. `benchmarks/worker_client.py` starts it.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TextIO

#: The length of a warm-up: enough to bring all weights back into memory.
N_WARM_UP_TOKENS = 8
#: The fields of specgen's last event that an answer has.
_FIGURES = (
    "text",
    "token_ids",
    "finish_reason",
    "n_prompt_tokens",
    "n_tokens",
    "n_rounds",
    "n_drafted",
    "n_accepted",
    "acceptance_rate",
    "mean_accepted_length",
    "tokens_per_s",
    "time_to_first_token_s",
    "prompt_s",
    "draft_s",
    "target_s",
    "wall_s",
    "others_share",
)
#: The lengths in OpenVINO's own example of prompt lookup.
_LOOKUP_DRAFT_TOKENS = 5
_LOOKUP_NGRAM_TOKENS = 3


class Answering(Protocol):
    """An engine with a loaded model."""

    def about(self) -> dict[str, Any]:
        """Describe the engine: its version, and anything else that affects its speed."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a prompt; return the figures."""


# --- the engines ------------------------------------------------------------------------------


class Specgen:
    """specgen with one draft, or without one.

    Every answer starts cold: the costs of decodes have been measured, but nothing is remembered
    from other answers. With `keeps_learning`, one engine generates all answers, so everything that
    it has learnt is kept, and its answers are searched for drafts.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from specgen import GenerationOptions, SamplerOptions, Session, SessionOptions
        from specgen.options import ContextOptions, KernelOptions
        from specgen.session.calibration import calibrate
        from specgen.session.engine import Engine
        from specgen.session.open import start_kernels

        start_kernels(KernelOptions())
        draft: Any = settings["draft"]
        if draft not in ("ngram", "none"):
            draft = Path(draft)
        self._options = SessionOptions(
            Path(settings["target"]),
            draft,
            sampler=SamplerOptions(temperature=0.0),
            generation=GenerationOptions(max_tokens=settings["max_tokens"]),
            target_context=ContextOptions(n_ctx=settings.get("n_ctx")),
            draft_context=ContextOptions(n_ctx=settings.get("n_ctx")),
        )
        # This session stays open to keep the weights loaded, so that opening another takes no time.
        self._session = Session(self._options, time.perf_counter)
        calibrate(self._session)
        self._engine = Engine(self._session) if settings["keeps_learning"] else None
        self._calibrated = copy.deepcopy(self._session.measurements)

    def about(self) -> dict[str, Any]:
        import specgen

        target = self._session.target
        return {
            "version": specgen.__version__,
            "folder": str(Path(specgen.__file__).parent),
            "kernels": target.kernels,
            "weights_bytes": target.size_bytes,
            # Earlier versions lack this attribute.
            "streamed_bytes": getattr(target, "streamed_bytes", 0),
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        from specgen import Session, SpecgenError
        from specgen.session.engine import generate

        try:
            if request["is_warm_up"]:
                self._warm_up(request["prompt"])
                return {}
            if self._engine is not None:
                prompt = self._session.prompts.of_text(request["prompt"])
                return _figures_of(self._engine.stream(self._engine.insert(prompt)))
            measurements = copy.deepcopy(self._calibrated)
            memory: dict[str, Any] = {}
            # Earlier versions keep all weights in memory, and have no budget.
            if hasattr(self._session, "budget"):
                memory["budget"] = self._session.budget
            with Session(self._options, time.perf_counter, measurements, **memory) as session:
                prompt = session.prompts.of_text(request["prompt"])
                return _figures_of(generate(session, prompt))
        except SpecgenError as error:
            return {"error": error.message}

    def _warm_up(self, prompt: str) -> None:
        from specgen import CommittedEvent
        from specgen.session.engine import generate

        events = generate(self._session, self._session.prompts.of_text(prompt))
        for event in events:
            if isinstance(event, CommittedEvent) and event.n_tokens >= N_WARM_UP_TOKENS:
                break
        events.close()


def _figures_of(events: Iterable[Any]) -> dict[str, Any]:
    """Return the figures of an answer, given its events; the last one is its summary."""
    *_, finished = events
    return {name: getattr(finished, name) for name in _FIGURES}


class MappedLlama:
    """llama.cpp with its own kernels on the memory-mapped file, without drafts.

    The weights are not repacked, because that would need memory for all of them.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._llama: Any = importlib.import_module("llama_cpp")
        self._numpy: Any = importlib.import_module("numpy")
        self._max_tokens = settings["max_tokens"]
        llama = self._llama
        llama.llama_backend_init()
        options = llama.llama_model_default_params()
        options.n_gpu_layers = 0
        options.use_mmap = True
        options.use_extra_bufts = False
        self._model = llama.llama_model_load_from_file(settings["target"].encode(), options)
        if not self._model:
            raise RuntimeError(f"{settings['target']} cannot be loaded")
        self._vocabulary = llama.llama_model_get_vocab(self._model)
        self._n_vocab = llama.llama_vocab_n_tokens(self._vocabulary)
        context_options = llama.llama_context_default_params()
        context_options.n_ctx = settings["n_ctx"]
        context_options.n_threads = settings["n_threads"]
        context_options.n_threads_batch = settings["n_threads"]
        self._context = llama.llama_init_from_model(self._model, context_options)

    def about(self) -> dict[str, Any]:
        return {"version": self._llama.__version__}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        max_tokens = N_WARM_UP_TOKENS if request["is_warm_up"] else self._max_tokens
        llama = self._llama
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        started_s = time.perf_counter()
        token = self._decode(request["tokens"])
        first_s = time.perf_counter()
        token_ids = [token]
        while len(token_ids) < max_tokens and not self._is_end(token):
            token = self._decode([token])
            token_ids.append(token)
        if self._is_end(token):  # not counted, as in specgen
            token_ids.pop()
        return _timed(token_ids, started_s, first_s, time.perf_counter())

    def _is_end(self, token: int) -> bool:
        return bool(self._llama.llama_vocab_is_eog(self._vocabulary, token))

    def _decode(self, tokens: Sequence[int]) -> int:
        """Decode tokens in one batch; return the most likely next token."""
        llama = self._llama
        rows = (llama.llama_token * len(tokens))(*tokens)
        status = llama.llama_decode(self._context, llama.llama_batch_get_one(rows, len(tokens)))
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = llama.llama_get_logits_ith(self._context, -1)
        return int(self._numpy.ctypeslib.as_array(logits, (self._n_vocab,)).argmax())


class OpenVino:
    """OpenVINO GenAI, plain or with `prompt_lookup`. It supports only some GGUF files."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        options = {
            "ATTENTION_BACKEND": "PA",
            "INFERENCE_NUM_THREADS": settings["n_threads"],
        }
        if settings["prompt_lookup"]:
            options["prompt_lookup"] = True
        self._pipeline = self._genai.LLMPipeline(settings["target"], "CPU", **options)
        self._config = self._pipeline.get_generation_config()
        self._config.do_sample = False
        if settings["prompt_lookup"]:
            self._config.num_assistant_tokens = _LOOKUP_DRAFT_TOKENS
            self._config.max_ngram_size = _LOOKUP_NGRAM_TOKENS
        self._max_tokens = settings["max_tokens"]

    def about(self) -> dict[str, Any]:
        return {"version": self._genai.__version__}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        tokens = self._numpy.array([request["tokens"]], dtype=self._numpy.int64)
        inputs = self._genai.TokenizedInputs(
            self._openvino.Tensor(tokens),
            self._openvino.Tensor(self._numpy.ones_like(tokens)),
        )
        self._config.max_new_tokens = N_WARM_UP_TOKENS
        if not request["is_warm_up"]:
            self._config.max_new_tokens = self._max_tokens
        started_s = time.perf_counter()
        result = self._pipeline.generate(inputs, self._config)
        ended_s = time.perf_counter()
        token_ids = [int(token) for token in result.tokens[0]]
        # OpenVINO's own measurement, because its callback for text runs some tokens late.
        first_s = started_s + result.perf_metrics.get_ttft().mean / 1000.0
        return _timed(token_ids, started_s, first_s, ended_s)


class IkLlama:
    """ik_llama.cpp through ik-llama-cpp-python, which has no drafts.

    With `repack`, the weights are repacked when they are loaded. The generation loop is here,
    because the package's own loop copies the logits to Python one by one.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._package: Any = importlib.import_module("ik_llama_cpp")
        self._api: Any = importlib.import_module("ik_llama_cpp._ctypes_api")
        self._internals: Any = importlib.import_module("ik_llama_cpp._internals")
        self._numpy: Any = importlib.import_module("numpy")
        self._max_tokens = settings["max_tokens"]
        api = self._api
        api.llama_backend_init()
        options = api.llama_model_default_params()
        options.repack_tensors = settings["repack"]
        # Repacked weights cannot be mapped from the file.
        options.use_mmap = not settings["repack"]
        model = api.llama_model_load_from_file(settings["target"].encode(), options)
        if not model:
            raise RuntimeError(f"{settings['target']} cannot be loaded")
        self._n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._model = model
        # The package's own rule: its flash attention fails on processors without AVX-VNNI.
        llama: Any = importlib.import_module("ik_llama_cpp.llama")
        self._context = self._internals.IkContext(
            SimpleNamespace(model=model, n_vocab=self._n_vocab),
            n_ctx=settings["n_ctx"],
            n_threads=settings["n_threads"],
            flash_attn=llama._cpu_has_avx_vnni(),  # noqa: SLF001
        )

    def about(self) -> dict[str, Any]:
        return {"version": self._package.__version__}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        max_tokens = N_WARM_UP_TOKENS if request["is_warm_up"] else self._max_tokens
        self._context.kv_cache_clear()
        started_s = time.perf_counter()
        token = self._prefill(request["tokens"])
        first_s = time.perf_counter()
        token_ids = [token]
        position = len(request["tokens"])
        while len(token_ids) < max_tokens and not self._api.llama_token_is_eog(self._model, token):
            token = self._decode(self._internals.make_batch_single(token, position))
            token_ids.append(token)
            position += 1
        return _timed(token_ids, started_s, first_s, time.perf_counter())

    def _prefill(self, tokens: Sequence[int]) -> int:
        """Decode the prompt in chunks that fit a batch; return the first token of the answer."""
        size = self._context._n_ubatch  # noqa: SLF001
        token = -1
        for start in range(0, len(tokens), size):
            chunk = list(tokens[start : start + size])
            batch = self._internals.make_batch_range(chunk, pos_start=start, logits_last=True)
            token = self._decode(batch)
        return token

    def _decode(self, batch: Any) -> int:
        """Decode a batch; return the most likely token after its last row."""
        status = self._context.decode(batch)
        self._api.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = self._context.get_logits(-1)
        return int(self._numpy.ctypeslib.as_array(logits, (self._n_vocab,)).argmax())


def _timed(
    token_ids: Sequence[int],
    started_s: float,
    first_s: float,
    ended_s: float,
) -> dict[str, Any]:
    """Return the figures of an answer from its tokens and times.

    Args:
        token_ids: The answer's tokens, the end-of-text token included.
        started_s: When the prefill began.
        first_s: When the first token was generated.
        ended_s: When the last token was generated.
    """
    n_later = len(token_ids) - 1
    seconds = ended_s - first_s
    return {
        "token_ids": token_ids,
        "n_tokens": len(token_ids),
        "tokens_per_s": n_later / seconds if n_later > 0 and seconds > 0.0 else None,
        "time_to_first_token_s": first_s - started_s,
        "wall_s": ended_s - started_s,
    }


# --- the process ------------------------------------------------------------------------------

_ENGINES: dict[str, Callable[[dict[str, Any]], Answering]] = {
    "specgen": Specgen,
    "mapped-llama": MappedLlama,
    "openvino": OpenVino,
    "ik-llama": IkLlama,
}


def serve(name: str, requests: TextIO, answers: TextIO) -> None:
    """Load an engine with the settings in the first line, and answer all other lines."""
    engine = _ENGINES[name](json.loads(next(requests)))
    _write(answers, engine.about())
    for line in requests:
        read_before = _bytes_read()
        answer = engine.answer(json.loads(line))
        read_after = _bytes_read()
        if read_before is not None and read_after is not None:
            answer["disk_bytes"] = read_after - read_before
        _write(answers, answer)


def _bytes_read() -> int | None:
    """Return the bytes that this process has read from disk; None if the system does not count."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"])


def _write(stream: TextIO, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


def main() -> None:
    # Other benchmarks in this folder have the names of installed packages.
    sys.path.remove(str(Path(__file__).resolve().parent))
    # Native code prints to stdout, too. Send that to stderr, so that stdout has only answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, answers)


if __name__ == "__main__":
    main()
