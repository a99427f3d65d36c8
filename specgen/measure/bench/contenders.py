"""The contenders of a benchmark: plain decoding, drafting in some way, another program."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from specgen.events import CommittedEvent, FinishedEvent, NoticeEvent
from specgen.llama import default_threads
from specgen.llama.mtp_layers import why_no_mtp
from specgen.measure.bench.peers import (
    SETTINGS,
    PeerJob,
    PeerResult,
    PeerSetting,
    find_program,
    peer_prompt,
    run_peer,
)

if TYPE_CHECKING:
    from specgen.session.loaded_models import Models

#: The date for chat templates that write one, fixed so that prompts do not change between runs.
NOW = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)
#: llama.cpp in its usual settings, or in all settings known here.
Against: TypeAlias = Literal["llama.cpp", "llama.cpp-all"]
AGAINST: tuple[Against, ...] = ("llama.cpp", "llama.cpp-all")
#: The settings that people use most, and those that were best in some category of text.
_USUAL = (
    "draft 3",
    "draft 8, p-min 0.75",
    "ngram-simple 4/8, draft 3",
    "ngram-simple 4/8",
    "lookup 8",
    "mtp 1",
    "mtp 3",
)
#: The usual number of characters in a token.
_CHARACTERS = 4
#: Tokens of an answer that only warms up.
_N_WARM_UP = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measurements of one answer; None means that a contender does not report it. Times are seconds.

    `tokens_per_s` counts the tokens after the first one. `token_ids` exclude the token that ended the answer.
    Counts by depth begin with the first drafted token. `target_s`, `draft_s` and `own_s` divide the time
    after the prompt: in the target, in the drafter, and in the program itself.
    """

    text: str
    n_tokens: int
    finish_reason: str | None
    tokens_per_s: float | None
    time_to_first_token_s: float | None
    token_ids: tuple[int, ...] | None = None
    n_rounds: int | None = None
    n_drafted: int | None = None
    n_accepted: int | None = None
    mean_accepted_length: float | None = None
    drafted_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    prompt_s: float | None = None
    target_s: float | None = None
    draft_s: float | None = None
    own_s: float | None = None
    #: Notices for the user, for example that drafting failed.
    notices: tuple[str, ...] = ()

    @property
    def is_interrupted(self) -> bool:
        return self.finish_reason == "interrupted"

    def says_the_same(self, other: Outcome) -> bool:
        """Return whether two texts are equal, token by token if both report their tokens.

        A program that does not report them may write some tokens more than the limit. If the other answer
        ended at the limit, only its text has to agree.
        """
        if self.token_ids is not None and other.token_ids is not None:
            return self.token_ids == other.token_ids
        limited, longer = (self, other) if self.finish_reason == "length" else (other, self)
        if limited.finish_reason == "length":
            # The limit may have cut a character in two; the longer text has all of it.
            return longer.text.startswith(limited.text.rstrip("\N{REPLACEMENT CHARACTER}"))
        return self.text == other.text


class Contender(Protocol):
    """Answers prompts, always in the same way.

    Both methods may raise a `SpecgenError`: `PromptError` if the prompt does not fit, any other if the
    contender cannot go on.
    """

    @property
    def name(self) -> str:
        """The name in tables; it is unique in a lineup."""
        ...

    def answer(self, prompt: str) -> Outcome:
        """Answer a prompt, given as a user types it."""
        ...

    def warm_up(self, prompt: str) -> None:
        """Do the work that makes the first answer slower than others, for example with a short
        answer."""
        ...


class SessionContender:
    """Loaded models with their options as a contender. It does not close them."""

    def __init__(
        self,
        name: str,
        loaded: Models,
        *,
        chat: bool | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name = name
        self._loaded = loaded
        self._chat = chat
        self._interrupted = interrupted

    @property
    def name(self) -> str:
        return self._name

    @property
    def kernels(self) -> str:
        """Whose code computes the target, and where."""
        return self._loaded.target.kernels

    def expected_s(self, prompts: Sequence[str], n_tokens: int) -> float:
        """Return about how many seconds plain decoding of so many tokens takes for each prompt, by measured costs.
        Raise `MemoryLimitError`, and `KeyboardInterrupt` if interrupted."""
        from specgen.session.measurements import target_costs

        costs = target_costs(self._loaded, self._interrupted)
        n_rows = max(costs.known)
        n_read = sum(map(len, prompts)) / _CHARACTERS
        return n_read * costs.seconds(n_rows) / n_rows + len(prompts) * n_tokens * costs.seconds(1)

    def answer(self, prompt: str) -> Outcome:
        from specgen.session.engine import generate

        loaded = self._loaded
        begun = loaded.prompts.of_text(prompt, chat=self._chat, now=NOW)
        notices: list[str] = []
        finished: FinishedEvent | None = None
        for event in generate(loaded, begun, interrupted=self._interrupted, estimate_gain=False):
            if isinstance(event, NoticeEvent):
                notices.append(event.message)
            elif isinstance(event, FinishedEvent):
                finished = event
        assert finished is not None, "the last event of a generation"
        return outcome_of(finished, tuple(notices))

    def warm_up(self, prompt: str) -> None:
        from specgen.session.engine import generate

        loaded = self._loaded
        begun = loaded.prompts.of_text(prompt, chat=self._chat, now=NOW)
        events = generate(loaded, begun, interrupted=self._interrupted, estimate_gain=False)
        # Closing the generator frees the contexts.
        with contextlib.closing(events):
            for event in events:
                if isinstance(event, CommittedEvent) and event.n_tokens >= _N_WARM_UP:
                    break


def outcome_of(finished: FinishedEvent, notices: tuple[str, ...] = ()) -> Outcome:
    """Return the outcome of a generation that ended with this event."""
    return Outcome(
        text=finished.text,
        n_tokens=finished.n_tokens,
        finish_reason=finished.finish_reason,
        tokens_per_s=finished.tokens_per_s,
        time_to_first_token_s=finished.time_to_first_token_s,
        token_ids=finished.token_ids,
        n_rounds=finished.n_rounds,
        n_drafted=finished.n_drafted,
        n_accepted=finished.n_accepted,
        mean_accepted_length=finished.mean_accepted_length,
        drafted_by_depth=finished.drafted_by_depth,
        accepted_by_depth=finished.accepted_by_depth,
        prompt_s=finished.prompt_s,
        target_s=max(0.0, finished.target_s - finished.prompt_s),
        draft_s=finished.draft_s,
        own_s=finished.loop_s,
        notices=notices,
    )


# --- other programs --------------------------------------------------------------------------------


class PeerContender:
    """One of llama.cpp's programs in one setting. The models give prompts and options; they are not closed, and
    do not decode."""

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
        self.name = name
        self._program = program
        self._setting = setting
        self._draft = draft
        self._loaded = loaded
        self._chat = chat
        self._interrupted = interrupted

    def warm_up(self, prompt: str) -> None:
        """Do nothing: every run loads the models and warms them up before its clock starts."""

    def answer(self, prompt: str) -> Outcome:
        options = self._loaded.options
        begun = self._loaded.prompts.of_text(prompt, chat=self._chat, now=NOW)
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
        return outcome_of_peer(
            run_peer(self._program, self._setting, job, interrupted=self._interrupted)
        )


def peers_of(
    against: Against,
    loaded: Models,
    drafts: Mapping[str, Path],
    *,
    folder: Path | None,
    chat: bool | None,
    interrupted: Callable[[], bool],
) -> list[PeerContender]:
    """Return the contenders of a name, one for each draft model if a setting needs one. Raises `PeerError` if
    a program is missing."""
    found: list[PeerContender] = []
    has_mtp = not why_no_mtp(loaded.options.target)
    for setting in SETTINGS:
        is_left_out = against == "llama.cpp" and setting.name not in _USUAL
        if is_left_out or (setting.needs_mtp and not has_mtp):
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


def outcome_of_peer(result: PeerResult | None) -> Outcome:
    """Return the outcome of another program's run; None means that it was interrupted."""
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
