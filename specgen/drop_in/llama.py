"""`Llama`, with the interface of llama-cpp-python's class of that name (docs/python.md)."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
import uuid
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from specgen.api import Model, load
from specgen.drop_in.arguments import LlamaArguments, Loading, loading_of
from specgen.drop_in.completions import (
    CHAT_DEFAULTS,
    TEXT_DEFAULTS,
    ChatArguments,
    CompletionArguments,
    body_of,
)
from specgen.errors import UsageError
from specgen.events import Event
from specgen.llama.embeddings import Embedder, unit
from specgen.llama.model import LlamaModel
from specgen.models.download import fetch_reference, stderr_progress
from specgen.models.hub_names import HubReference
from specgen.option_values import checked_value, shown_value
from specgen.options import ContextOptions
from specgen.serve.formats.answer_writer import AnswerContext, AnswerWriter
from specgen.serve.formats.chat_completions import ChatCompletionRequest, read_chat
from specgen.serve.formats.completions import CompletionRequest, read_completion
from specgen.serve.formats.embeddings import embedding_response
from specgen.serve.formats.engine_requests import Reader, inserts_of, parse_requests, prompt_of
from specgen.serve.formats.fields import Json
from specgen.serve.formats.generation_request import as_list
from specgen.serve.formats.parsed_request import ParsedRequest
from specgen.session.choose_models import find_target
from specgen.system.arrays import Hidden

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: What llama-cpp-python's `Llama` has, and this one cannot have.
_MISSING = frozenset(
    [
        *("ctx", "eval", "eval_logits", "eval_tokens", "generate", "input_ids", "load_state"),
        *("sample", "save_state", "scores"),
    ]
)


class Llama:
    """A model with a draft, behind the interface of llama-cpp-python's `Llama`."""

    def __init__(
        self,
        model_path: str | Path,
        **arguments: Unpack[LlamaArguments],
    ) -> None:
        """Load a model and its draft.

        Args:
            model_path: A GGUF file, or a name as `specgen.load` takes it.
            **arguments: llama-cpp-python's arguments.

        Raises:
            UsageError: If an argument is invalid or cannot be honoured.
            SpecgenError: As from `specgen.load`.
        """
        self._resources = contextlib.ExitStack()
        # Programs that were written for llama-cpp-python rarely call `close`.
        weakref.finalize(self, self._resources.close)
        self._arguments = dict(arguments)
        self.model_path = str(checked_value("model_path", str | Path, model_path))
        loading = loading_of(arguments)
        self.verbose = loading.verbose
        #: The model that generates; None if there is only a vocabulary or embeddings.
        self._model: Model | None = None
        #: The model that makes embeddings; None if this one does not.
        self._embedder: Embedder | None = None
        #: The loaded target.
        self._target = self._load(loading)
        #: Makes the seeds of answers; None for random ones.
        self._seeds: random.Random | None = None
        if loading.seed is not None:
            self.set_seed(loading.seed)
        #: How the context was made.
        self.context_params = ContextParams(loading.context, self.n_ctx())
        #: The metadata of the model's file, as texts.
        self.metadata: dict[str, str] = self._target.all_metadata()
        self.chat_format = arguments.get("chat_format")

    def _load(self, loading: Loading) -> LlamaModel:
        """Load what the arguments ask for; return the target."""
        options = loading.context
        if loading.vocab_only:
            file = find_target(self.model_path, quiet=not self.verbose)
            target = LlamaModel(file, vocabulary_only=True)
            self._resources.callback(target.close)
            return target
        if loading.embedding:
            file = find_target(self.model_path, quiet=not self.verbose)
            self._embedder = Embedder(file, options, options.n_ctx or sys.maxsize)
            self._resources.callback(self._embedder.close)
            return self._embedder.model
        self._model = load(
            self.model_path,
            loading.draft,
            context=options,
            draft_context=ContextOptions(n_gpu_layers=options.n_gpu_layers),
            kernels=loading.kernels,
            note=_print_note if loading.verbose else _no_note,
            repeat_last_n=loading.repeat_last_n,
        )
        self._resources.callback(self._model.close)
        return self._model.session.target

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name in _MISSING:
                message = f"specgen's Llama has no {name}; use llama_cpp.Llama for it"
                raise AttributeError(message)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- opening and closing ----------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        **arguments: Any,
    ) -> Llama:
        """Load a model from the Hugging Face hub, downloaded into its cache if need be.

        Args:
            repo_id: The repository.
            filename: The name of the file, or a pattern such as ``*q8_0.gguf``.
            **arguments: Those of `Llama`. The other parts of a split model need not be named.

        Raises:
            UsageError: If another folder is given for the download.
            UnknownModelError: If there is no such model.
            FetchError: If it cannot be downloaded.
        """
        for name in ("local_dir", "cache_dir"):
            if arguments.pop(name, None) is not None:
                raise UsageError(
                    f"{name}: models are stored in the Hugging Face cache",
                    "set HF_HUB_CACHE to use another folder",
                )
        for name in ("additional_files", "local_dir_use_symlinks"):
            arguments.pop(name, None)
        reference = HubReference(repo_id, file=filename)
        quiet = not arguments.get("verbose", True)
        path = fetch_reference(reference, progress=stderr_progress(quiet=quiet))
        return cls(path, **arguments)

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory. May be called twice."""
        self._resources.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"model_path": self.model_path, **self._arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Llama.__init__(self, **state)

    # --- the model --------------------------------------------------------------------------------

    def n_ctx(self) -> int:
        """Return the context size in tokens."""
        if self._model is not None:
            return self._model.engine.n_ctx
        if self._embedder is not None:
            return self._embedder.n_ctx
        return 0

    def n_embd(self) -> int:
        """Return the number of values of a hidden state."""
        return self._target.n_embd

    def n_vocab(self) -> int:
        """Return the number of tokens of the vocabulary."""
        return self._target.vocabulary.n_tokens

    def token_eos(self) -> int:
        """Return the end-of-text token; -1 if there is none."""
        return self._target.vocabulary.special_tokens()["eos"]

    def token_bos(self) -> int:
        """Return the beginning-of-text token; -1 if there is none."""
        return self._target.vocabulary.special_tokens()["bos"]

    def token_nl(self) -> int:
        """Return the token of a line break; -1 if there is none."""
        return self._target.vocabulary.line_break_token

    def pooling_type(self) -> int:
        """Return llama.cpp's number for how embeddings are pooled; 0 for a model of texts."""
        return self._target.pooling or 0

    def tokenize(
        self,
        text: bytes,
        add_bos: bool = True,
        special: bool = False,
    ) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: The text in UTF-8.
            add_bos: Whether the tokens are added that the model wants around a text.
            special: Whether the names of control tokens stand for these.

        Raises:
            UsageError: If it is not a text in UTF-8.
        """
        if not isinstance(text, bytes):
            raise UsageError(f"text: give bytes, not {shown_value(text)}")
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"text: it is not UTF-8: {error}") from None
        vocabulary = self._target.vocabulary
        return vocabulary.tokenize(decoded, add_special=add_bos, parse_special=special)

    def detokenize(
        self,
        tokens: Sequence[int],
        prev_tokens: Sequence[int] | None = None,
        special: bool = False,
    ) -> bytes:
        """Return the text of tokens in UTF-8.

        Args:
            tokens: The tokens.
            prev_tokens: Ignored, as by llama-cpp-python for GGUF vocabularies.
            special: Whether control tokens are written by their names.
        """
        del prev_tokens
        vocabulary = self._target.vocabulary
        if special:
            pieces = [vocabulary.shown_bytes(token) for token in tokens]
        else:
            pieces = [vocabulary.token_bytes(token) for token in tokens]
        text = b"".join(pieces)
        # The space that some models put before the first word of a text is not part of it.
        is_start = list(tokens[:1]) == [self.token_bos()]
        if is_start:
            text = text.removeprefix(b" ")
        return text

    def tokenizer(self) -> LlamaTokenizer:
        """Return the tokenizer for texts instead of bytes."""
        return LlamaTokenizer(self)

    # --- completions ------------------------------------------------------------------------------

    def set_seed(self, seed: int) -> None:
        """Make the seeds of the following answers from this one."""
        self._seeds = random.Random(seed)  # noqa: S311 - for sampling

    def reset(self) -> None:
        """Do nothing: an answer never depends on earlier ones."""

    def set_cache(self, cache: object) -> None:
        """Do nothing: the prefixes of earlier prompts are reused in any case."""

    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        **arguments: Unpack[CompletionArguments],
    ) -> Any:
        """Continue a text, or with `suffix` fill in its middle.

        Args:
            prompt: The text, or its tokens.
            suffix: The text after the answer.
            max_tokens: The maximum number of tokens; None or 0 for no limit but the context.
            **arguments: How tokens are sampled, and when the answer ends.

        Returns:
            OpenAI's object of a text completion, or an iterator of its chunks.

        Raises:
            UsageError: If an argument is invalid or cannot be honoured.
            PromptError: If the prompt is too long, or not valid.
        """
        body = body_of(
            CompletionRequest,
            TEXT_DEFAULTS,
            {**arguments, "suffix": suffix, "max_tokens": max_tokens},
            next_seed=self._next_seed(),
        )
        if not isinstance(prompt, (str, list, tuple)):
            raise UsageError(f"prompt: give a text or its tokens, not {shown_value(prompt)}")
        # llama-cpp-python continues the beginning-of-text token.
        if not prompt and not suffix:
            prompt = [max(0, self.token_bos())]
        body["prompt"] = list(prompt) if isinstance(prompt, tuple) else prompt
        return self._answer(read_completion, body)

    __call__ = create_completion

    def create_chat_completion(
        self,
        messages: Iterable[Mapping[str, Any]],
        **arguments: Unpack[ChatArguments],
    ) -> Any:
        """Answer a conversation.

        Args:
            messages: The messages in OpenAI's form.
            **arguments: Tools, the form of the answer, and how tokens are sampled.

        Returns:
            OpenAI's object of a chat completion, or an iterator of its chunks.

        Raises:
            UsageError: If an argument is invalid or cannot be honoured.
            PromptError: If the prompt is too long, or refused by the chat template.
        """
        body = body_of(ChatCompletionRequest, CHAT_DEFAULTS, arguments, next_seed=self._next_seed())
        if not isinstance(messages, Iterable):
            raise UsageError(f"messages: give a list of messages, not {shown_value(messages)}")
        body["messages"] = list(messages)
        return self._answer(read_chat, body)

    def create_chat_completion_openai_v1(
        self,
        messages: Iterable[Mapping[str, Any]],
        **arguments: Unpack[ChatArguments],
    ) -> Any:
        """Do what `create_chat_completion` does, with the classes of the package `openai`."""
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        answer = self.create_chat_completion(messages, **arguments)
        if arguments.get("stream"):
            return (ChatCompletionChunk(**chunk) for chunk in answer)
        return ChatCompletion(**answer)

    def _next_seed(self) -> int | None:
        return None if self._seeds is None else self._seeds.getrandbits(31)

    def _answer(
        self,
        read: Reader,
        body: Json,
    ) -> Json | Generator[Json, None, None]:
        """Answer a request: as a whole, or in chunks if it asks for that."""
        if self._model is None:
            raise UsageError(
                "this Llama does not generate text: it has vocab_only or embedding",
                "open another one without it",
            )
        model = self._model
        request, *others = parse_requests(read, model.session, body)
        if others or request.n > 1:
            raise UsageError("Llama gives one answer to one prompt; use specgen.load for several")
        prompt = prompt_of(request, model.session, self.n_ctx())
        # llama-cpp-python stops before the context is full, one token earlier than specgen.
        request = _with_max_tokens(request, self.n_ctx() - len(prompt.tokens))
        (insert,) = inserts_of(request, prompt)
        answer = insert(model.engine)
        context = AnswerContext(
            [request],
            prompts=[prompt.text],
            identity=uuid.uuid4().hex,
            created=int(time.time()),
            model=body.get("model", self.model_path),
            prompt_tokens=[prompt.tokens],
        )
        writer: AnswerWriter = request.writer(context)
        chunks = _chunks(writer, len(prompt.tokens), model.engine.stream(answer))
        if request.streams:
            return chunks
        for _ in chunks:
            pass
        return writer.whole()

    # --- embeddings -------------------------------------------------------------------------------

    def create_embedding(
        self,
        input: str | Sequence[str],  # noqa: A002 - llama-cpp-python's name
        model: str | None = None,
    ) -> Json:
        """Return the embeddings of texts as OpenAI's object.

        Raises what `embed` raises.
        """
        vectors, n_tokens = self._embeddings(as_list(input), truncate=True)
        encoded = [json.dumps(vector.tolist()) for vector in vectors]
        content = embedding_response(encoded, n_tokens, model or self.model_path, ())
        answer: Json = json.loads(content)
        return answer

    def embed(
        self,
        input: str | Sequence[str],  # noqa: A002 - llama-cpp-python's name
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """Return the embeddings of texts, or of one text.

        Args:
            input: The texts.
            normalize: Whether vectors are scaled to length 1.
            truncate: Whether texts are cut to the context size.
            return_count: Whether the number of all tokens is returned, too.

        Raises:
            UsageError: If this `Llama` was opened without ``embedding``.
            PromptError: If a text is empty or too long.
        """
        vectors, n_tokens = self._embeddings(as_list(input), truncate=truncate)
        if normalize:
            vectors = [unit(vector) for vector in vectors]
        lists = [vector.tolist() for vector in vectors]
        found = lists[0] if isinstance(input, str) else lists
        if return_count:
            return found, n_tokens
        return found

    def _embeddings(
        self,
        texts: Sequence[str],
        *,
        truncate: bool,
    ) -> tuple[list[Hidden], int]:
        """Return the embedding of each text, float32[n_embd], and the number of all tokens."""
        embedder = self._embedder
        if embedder is None:
            raise UsageError("this Llama makes no embeddings", "open it with embedding=True")
        inputs: list[list[int]] = []
        for text in texts:
            tokens = self.tokenize(text.encode())
            if truncate:
                tokens = tokens[: embedder.n_ctx]
            embedder.check(tokens)
            inputs.append(tokens)
        vectors = [embedder.pooled(tokens) for tokens in inputs]
        return vectors, sum(map(len, inputs))


def _print_note(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - as llama-cpp-python does


def _no_note(_text: str) -> None:
    pass


class LlamaTokenizer:
    """The tokenizer of a `Llama`, for texts."""

    def __init__(self, llama: Llama) -> None:
        self.tokenize = llama.tokenize
        self.detokenize = llama.detokenize

    def encode(
        self,
        text: str,
        add_bos: bool = True,
        special: bool = True,
    ) -> list[int]:
        """Return the tokens of a text."""
        return self.tokenize(text.encode(), add_bos, special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self.detokenize(tokens).decode("utf-8", "replace")


class ContextParams:
    """How the context of a `Llama` was made, by the names of llama.cpp's fields."""

    def __init__(self, options: ContextOptions, n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self.n_batch = options.n_batch
        self.n_threads = options.n_threads
        self.n_threads_batch = options.n_threads_batch


def _with_max_tokens(request: ParsedRequest, n_tokens: int) -> ParsedRequest:
    """Return the request with at most this number of tokens, but at least one."""
    generation = request.generation
    if 0 <= generation.max_tokens <= n_tokens:
        return request
    return replace(request, generation=replace(generation, max_tokens=max(1, n_tokens)))


def _chunks(
    writer: AnswerWriter,
    n_prompt_tokens: int,
    events: Iterable[Event],
) -> Generator[Json, None, None]:
    """Yield the chunks of an answer."""
    yield from writer.begin(n_prompt_tokens)
    for event in events:
        yield from writer.feed(0, event)
