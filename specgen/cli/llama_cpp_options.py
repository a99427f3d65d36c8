"""Options of llama.cpp's programs that are typed out of habit.

Options for what specgen does by default are ignored, with one note. Those that have an equal are
replaced by it. Others are refused, with what to use instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgen.errors import UsageError

#: Options without a value for what is the default here: for all commands (""), and for some.
_DEFAULTS = {
    "": "--jinja --color -co --no-display-prompt --warmup --no-warmup --mmap --no-context-shift "
    "--no-escape --log-disable --no-perf --no-show-timings --repack --kv-offload -kvo --op-offload "
    "--no-mmproj --cont-batching -cb --cache-prompt",
    "run": "--single-turn -st",
    "chat": "--conversation -cnv --interactive -i --interactive-first -if --multiline-input -mli",
    "serve": "--metrics --props --slots --webui --ui",
}
#: llama.cpp's options by our equals, which keep the value that follows.
_EQUALS = {
    "--system": "--system-prompt",
    "--gpu-layers": "--n-gpu-layers",
    "--gpu-layers-draft": "--n-gpu-layers-draft --spec-draft-ngl",
    "--draft": "--spec-draft-model",
    "--draft-max": "--spec-draft-n-max",
    "--draft-min": "--spec-draft-n-min --draft-n-min",
    "--draft-p-min": "--spec-draft-p-min",
    "--draft mtp": "--mtp",
    "--raw": "--no-conversation -no-cnv",
    "--file": "--in-file",
    "--stats": "--perf --show-timings",
    "--show none": "--simple-io",
    "--verbose": "--log-verbose",
}
#: Our equal, as words, by llama.cpp's option.
_EQUAL = {name: equal.split() for equal, names in _EQUALS.items() for name in names.split()}
#: What to use instead of options that have no equal.
_HINTS = {
    "-ub --ubatch-size": "-b N is how many prompt tokens are decoded at once",
    "-e --escape": r"write line breaks as the shell does: $'one\ntwo'",
    "-cnv --conversation -i --interactive -if --interactive-first -mli --multiline-input": (
        "`specgen chat` is a conversation; `specgen run` answers one prompt"
    ),
    "-st --single-turn -no-cnv --no-conversation": "`specgen run` answers one prompt",
    "--display-prompt --verbose-prompt": "--json shows the prompt as the model sees it",
    "--no-mmap --mlock -lm --load-mode": "leave it out: specgen maps the file",
    "-sysf --system-prompt-file": '--system "$(cat FILE)" takes it from a file',
    "-td --threads-draft -tbd --threads-batch-draft --spec-draft-threads -ctkd -ctvd": (
        "-t, -tb, -ctk and -ctv are for the draft, too"
    ),
    "-C -Cr --cpu-mask --cpu-range --cpu-strict --prio --poll --numa": (
        "leave it out: specgen measures how many threads are best"
    ),
    "--no-jinja": "--chat-template replaces the model's own template; --raw uses none",
    "--log-file -lv --verbosity --log-verbosity --log-colors --log-prefix": (
        "-v and -vv say more on standard error; `2> FILE` keeps it"
    ),
    "--keep --context-shift": "an answer ends where the context is full: -c N makes it larger",
    "--spec-type": "--draft says what drafts: a model, mtp, ngram or heads",
    "-mu --model-url": "download it, or name it with -hf USER/REPO:QUANT",
    "--api-key": "--api-key-file FILE: other users of the machine can see options",
    "-to --timeout": "--limit-time SECONDS is the most that an answer may take",
    "--ssl-key-file --ssl-cert-file": "put a proxy with TLS in front of it",
    "--offline": "the variable HF_HUB_OFFLINE=1 does so",
    # Without these, the first letter would count as an option and the rest as its value.
    "-bf --binary-file --prompt-cache-all --prompt-cache-ro -ot -cmoe -ncmoe -nkvo -mg -sm -dev "
    "-devd -ctxcp -cram -kvu -ptc -sp -nocb -dt -gan -gaw -mm -bs -lcd -sps -nr": "",
}
_INSTEAD = {name: hint for names, hint in _HINTS.items() for name in names.split()}
#: Options that name models on the hub, and ours that take such a name as hf:USER/REPO:QUANT.
_HUB = {
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "-m"),
    **dict.fromkeys(("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"), "-md"),
}
#: What else says something about a model on the hub.
_HUB_OTHERS = {"-hff": "file", "--hf-file": "file", "-hft": "token", "--hf-token": "token"}


def translated(context: Any, arguments: Sequence[str]) -> list[str]:
    """Return a command line without llama.cpp's own options.

    Raises:
        UsageError: An option of llama.cpp's has no equal.
    """
    translation = _Translation(context, arguments)
    translation.run()
    if translation.ignored and not {"-q", "--quiet"} & {*arguments}:
        names = ", ".join(dict.fromkeys(translation.ignored))
        print(f"note: {names}: ignored, specgen does this by default", file=sys.stderr)
    if translation.token is not None:
        os.environ["HF_TOKEN"] = translation.token
    if translation.file is None:
        return translation.words
    return _with_file(translation.words, translation.file)


class _Translation:
    """A command line that is translated word by word."""

    def __init__(self, context: Any, arguments: Sequence[str]) -> None:
        self._command: str = context.command_path
        #: The options of the command, by their spellings.
        self._own: dict[str, Any] = {
            name: option
            for option in context.command.params
            for name in (*option.opts, *option.secondary_opts)
        }
        own_defaults = _DEFAULTS.get(context.command.name, "")
        self._defaults = {*_DEFAULTS[""].split(), *own_defaults.split()}
        #: The words to translate.
        self._rest = list(arguments)
        #: The words of the translated command line.
        self.words: list[str] = []
        #: The options that were ignored.
        self.ignored: list[str] = []
        #: A file in the target's repository, and a token for the hub.
        self.file: str | None = None
        self.token: str | None = None

    def run(self) -> None:
        """Translate the command line."""
        while self._rest:
            word = self._rest.pop(0)
            if word == "--":  # no options follow
                self.words += [word, *self._rest]
                return
            self._translate(word)

    def _translate(self, word: str) -> None:
        """Translate a word, which may be an option, and the option's value."""
        name, equals, value = word.partition("=")
        if name in self._own:
            self.words.append(word)
            if self._own[name].param_type_name == "option" and not equals:
                self._keep_value(name)
        elif _HUB.get(name) in self._own or name in _HUB_OTHERS:
            if not equals and self._rest:
                value = self._rest.pop(0)
            self._take_from_hub(name, value)
        elif name in self._defaults:
            self._ignore(name)
        elif name in _EQUAL and _EQUAL[name][0] in self._own:
            self.words += _EQUAL[name]
            if equals:
                self.words.append(value)
        elif name in _INSTEAD or name in _EQUAL:
            hint = _INSTEAD.get(name) or f"`{self._command} --help-all` has all options"
            raise UsageError(
                f"{name} is an option of llama.cpp that `{self._command}` does not have", hint
            )
        else:
            self.words.append(word)

    def _keep_value(self, name: str) -> None:
        """Take the value of one of our options as it is, whatever it looks like."""
        option = self._own[name]
        if not self._rest or option.is_flag or option.count:
            return
        value = self._rest.pop(0)
        self.words.append(value)
        # llama.cpp's --draft is a number of tokens.
        if name == "--draft" and value.isdigit() and not Path(value).exists():
            hint = f"--draft-max {value} drafts {value} tokens at most"
            raise UsageError(f"--draft {value}: not a model", hint)

    def _take_from_hub(self, name: str, value: str) -> None:
        from specgen.models.hub_names import parse_reference

        if name in _HUB:
            self.words += [_HUB[name], str(parse_reference(value))]
        elif _HUB_OTHERS[name] == "file":
            self.file = value
        else:
            self.token = value

    def _ignore(self, name: str) -> None:
        self.ignored.append(name)
        takes_value = name in ("--color", "-co")
        if takes_value and self._rest and self._rest[0] in ("on", "off", "auto"):
            value = self._rest.pop(0)
            if value == "off" and "--show" in self._own:
                self.words += ["--show", "none"]


def _with_file(words: list[str], file: str) -> list[str]:
    """Return the words with a file in the target's repository as the target."""
    places = [
        at for at, word in enumerate(words) if word.startswith("hf:") and words[at - 1] == "-m"
    ]
    if len(places) != 1:
        raise UsageError("--hf-file needs one --hf-repo", "name it with -hf USER/REPO")
    from specgen.models.hub_names import parse_reference

    (at,) = places
    repository = words[at].split(":")[1]
    return [*words[:at], str(parse_reference(f"{repository}/{file}")), *words[at + 1 :]]
