"""Other programs as contenders of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from specgen.llama import default_threads
from specgen.measure.bench.contenders import NOW, Outcome
from specgen.measure.bench.peers import (
    SETTINGS,
    PeerJob,
    PeerResult,
    PeerSetting,
    find_program,
    peer_prompt,
    run_peer,
)
from specgen.measure.bench.prompt_lookup import LookupJob, run_lookup

if TYPE_CHECKING:
    from specgen.engine.loaded_models import Models
    from specgen.engine.prompts import Prompt

#: llama.cpp in its usual settings, in all settings known here, or llama-cpp-python's prompt lookup.
Against: TypeAlias = Literal["llama.cpp", "llama.cpp-all", "llama-cpp-python"]
AGAINST: tuple[Against, ...] = ("llama.cpp", "llama.cpp-all", "llama-cpp-python")
#: The settings that people use most, and those that were best in some category of text.
_USUAL = (
    "draft 3",
    "draft 8, p-min 0.75",
    "ngram-simple 4/8, draft 3",
    "ngram-simple 4/8",
    "lookup 8",
)
#: The lengths that llama-cpp-python's documentation advises for CPUs and for GPUs.
_LOOKUP_LENGTHS = (2, 10)


class _OtherProgram:
    """A contender that answers without specgen. The models give prompts and options; they are not closed, and
    its models are not used."""

    def __init__(
        self,
        name: str,
        loaded: Models,
        *,
        chat: bool | None,
        interrupted: Callable[[], bool],
    ) -> None:
        self.name = name
        self._loaded = loaded
        self._chat = chat
        self._interrupted = interrupted

    def warm_up(self, prompt: str) -> None:
        """Do nothing: every run loads the models and warms them up before its clock starts."""

    def _begun(self, prompt: str) -> Prompt:
        return self._loaded.prompts.of_text(prompt, chat=self._chat, now=NOW)


class PeerContender(_OtherProgram):
    """One of llama.cpp's programs in one setting."""

    def __init__(
        self,
        name: str,
        program: Path,
        setting: PeerSetting,
        draft: Path | None,
        loaded: Models,
        *,
        chat: bool | None,
        interrupted: Callable[[], bool],
    ) -> None:
        super().__init__(name, loaded, chat=chat, interrupted=interrupted)
        self._program = program
        self._setting = setting
        self._draft = draft

    def answer(self, prompt: str) -> Outcome:
        options = self._loaded.options
        begun = self._begun(prompt)
        job = PeerJob(
            target=options.target,
            prompt=peer_prompt(self._loaded, begun),
            n_tokens=options.generation.max_tokens,
            n_threads=options.target_context.n_threads or default_threads(),
            draft=self._draft,
            sampler=options.sampler,
            target_context=options.target_context,
            draft_context=options.draft_context,
            ignore_eos=options.generation.ignore_eos,
        )
        return _outcome(run_peer(self._program, self._setting, job, interrupted=self._interrupted))


class LookupContender(_OtherProgram):
    """llama-cpp-python's `LlamaPromptLookupDecoding`."""

    def __init__(
        self,
        name: str,
        n_drafted_max: int,
        loaded: Models,
        *,
        chat: bool | None,
        interrupted: Callable[[], bool],
    ) -> None:
        super().__init__(name, loaded, chat=chat, interrupted=interrupted)
        self._n_drafted_max = n_drafted_max

    def answer(self, prompt: str) -> Outcome:
        options = self._loaded.options
        begun = self._begun(prompt)
        job = LookupJob(
            target=str(options.target),
            prompt=begun.tokens,
            n_tokens=options.generation.max_tokens,
            n_threads=options.target_context.n_threads or default_threads(),
            n_drafted_max=self._n_drafted_max,
            n_gpu_layers=options.target_context.n_gpu_layers,
            flash_attention=options.target_context.flash_attention != "off",
        )
        return _outcome(run_lookup(job, interrupted=self._interrupted))


def peers_of(
    against: Against,
    loaded: Models,
    drafts: Mapping[str, Path],
    *,
    folder: Path | None,
    chat: bool | None,
    interrupted: Callable[[], bool],
) -> list[PeerContender | LookupContender]:
    """Return the contenders of a name, one for each draft model if a setting needs one.

    llama-cpp-python's lookup is greedy only: at other temperatures there is none. Raise `PeerError` if a
    program is missing.
    """
    if against == "llama-cpp-python":
        if not loaded.options.sampler.greedy:
            return []
        return [
            LookupContender(f"{against} lookup {n}", n, loaded, chat=chat, interrupted=interrupted)
            for n in _LOOKUP_LENGTHS
        ]
    found: list[PeerContender | LookupContender] = []
    for setting in SETTINGS:
        if against == "llama.cpp" and setting.name not in _USUAL:
            continue
        program = find_program(setting.program, folder)
        with_drafts: dict[str, Path | None] = {"": None}
        if setting.needs_draft:
            with_drafts = {f" ({name})" if len(drafts) > 1 else "": p for name, p in drafts.items()}
        for suffix, draft in with_drafts.items():
            name = f"llama.cpp {setting.name}{suffix}"
            found.append(
                PeerContender(
                    name, program, setting, draft, loaded, chat=chat, interrupted=interrupted
                )
            )
    return found


def _outcome(result: PeerResult | None) -> Outcome:
    if result is None:
        return Outcome("", 0, "interrupted", None, None)
    return Outcome(
        text=result.text or "",
        n_tokens=result.n_tokens,
        finish_reason=None,
        tokens_per_s=result.tokens_per_s,
        time_to_first_token_s=None,
        token_ids=result.token_ids,
        n_drafted=result.n_drafted,
        n_accepted=result.n_accepted,
        prompt_s=result.prompt_s,
    )
