"""Options of llama.cpp's programs that are typed out of habit.

An option for what specgen does by default is ignored, with a note. One that has an equivalent is
replaced with it. Others are refused, with a hint at what to use instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from specgen.errors import UsageError
from specgen.system.files import named_path

#: Options for what specgen does by default: those of all commands (""), and those of some. They
#: take no values, except --color.
_IGNORED_OPTIONS = {
    "": "--jinja --color -co --no-display-prompt --warmup --no-warmup --mmap --no-context-shift "
    "--no-escape --log-disable --no-perf --no-show-timings --repack --kv-offload -kvo --op-offload "
    "--no-mmproj --cont-batching -cb --cache-prompt",
    "run": "--single-turn -st",
    "chat": "--conversation -cnv --interactive -i --interactive-first -if --multiline-input -mli",
    "serve": "--metrics --props --slots --webui --ui",
}
#: llama.cpp's options, by our equivalents. The value that follows stays.
_NAMES_BY_EQUIVALENT = {
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
#: Our equivalent of each of these options, as words of a command line.
_EQUIVALENTS = {
    name: equivalent.split()
    for equivalent, names in _NAMES_BY_EQUIVALENT.items()
    for name in names.split()
}
#: Options that have no equivalent, and what to use instead.
_HINTS_BY_NAMES = {
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
        "-v and -vv print more on standard error; `2> FILE` keeps it"
    ),
    "--keep --context-shift": "an answer ends where the context is full: -c N makes it larger",
    "--spec-type": "--draft chooses the kind of draft: a model, mtp, ngram or heads",
    "-mu --model-url": "download it, or name it with -hf USER/REPO:QUANT",
    "--api-key": "--api-key-file FILE: other users of the machine can see options",
    "-to --timeout": "--limit-time SECONDS limits the time of an answer",
    "--ssl-key-file --ssl-cert-file": "put a proxy with TLS in front of it",
    "--offline": "the variable HF_HUB_OFFLINE=1 does so",
    # Listed here so that -bf is not read as -b with the value "f".
    "-bf --binary-file --prompt-cache-all --prompt-cache-ro -ot -cmoe -ncmoe -nkvo -mg -sm -dev "
    "-devd -ctxcp -cram -kvu -ptc -sp -nocb -dt -gan -gaw -mm -bs -lcd -sps -nr": "",
}
#: The hint for each of these options; "" if there is none.
_HINTS = {name: hint for names, hint in _HINTS_BY_NAMES.items() for name in names.split()}
#: Our options by llama.cpp's that name a model on the hub. Ours take it as hf:USER/REPO:QUANT.
_HUB_MODELS = {
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "-m"),
    **dict.fromkeys(("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"), "-md"),
}
#: Options that give the file of the target in its repository, or the user's token for the hub.
_HUB_DETAILS = {"-hff": "file", "--hf-file": "file", "-hft": "token", "--hf-token": "token"}


def translated(context: Any, arguments: Sequence[str]) -> list[str]:
    """Return a command line with llama.cpp's options replaced with specgen's.

    It prints a note on options that are ignored, and puts the token for the hub, if one is given,
    into the environment.

    Args:
        context: Typer's context of the command.
        arguments: The words after the command's name.

    Raises:
        UsageError: If an option of llama.cpp has no equivalent.
    """
    translation = _Translation(context, arguments)
    translation.run()
    is_quiet = "-q" in arguments or "--quiet" in arguments
    if translation.ignored and not is_quiet:
        names = ", ".join(dict.fromkeys(translation.ignored))
        print(f"note: {names}: ignored, specgen does this by default", file=sys.stderr)
    if translation.token is not None:
        os.environ["HF_TOKEN"] = translation.token
    if translation.hub_file is None:
        return translation.words
    return _with_hub_file(translation.words, translation.hub_file)


class _Translation:
    """A command line that is translated word by word."""

    def __init__(self, context: Any, arguments: Sequence[str]) -> None:
        self._command: str = context.command_path
        #: The options of the command, by all their spellings.
        self._own_options: dict[str, Any] = {}
        for option in context.command.params:
            for name in (*option.opts, *option.secondary_opts):
                self._own_options[name] = option
        of_command = _IGNORED_OPTIONS.get(context.command.name, "")
        self._ignored_options = {*_IGNORED_OPTIONS[""].split(), *of_command.split()}
        #: The words that are not translated yet.
        self._rest = list(arguments)
        #: The words of the translated command line.
        self.words: list[str] = []
        #: The options that were ignored.
        self.ignored: list[str] = []
        #: The file of --hf-file, in the target's repository.
        self.hub_file: str | None = None
        #: The token of --hf-token.
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
        """Translate a word. If it is an option, its value may be the next word, or follow a "="."""
        name, equals_sign, value = word.partition("=")
        if name in self._own_options:
            self.words.append(word)
            if self._own_options[name].param_type_name == "option" and not equals_sign:
                self._keep_value(name)
        elif _HUB_MODELS.get(name) in self._own_options or name in _HUB_DETAILS:
            if not equals_sign and self._rest:
                value = self._rest.pop(0)
            self._take_hub_option(name, value)
        elif name in self._ignored_options:
            self._ignore(name)
        elif name in _EQUIVALENTS and _EQUIVALENTS[name][0] in self._own_options:
            self.words += _EQUIVALENTS[name]
            if equals_sign:
                self.words.append(value)
        elif name in _HINTS or name in _EQUIVALENTS:
            hint = _HINTS.get(name) or f"`{self._command} --help-all` has all options"
            raise UsageError(
                f"{name} is an option of llama.cpp that `{self._command}` does not have", hint
            )
        else:
            self.words.append(word)

    def _keep_value(self, name: str) -> None:
        """Take the value of one of our options, even if it looks like an option itself."""
        option = self._own_options[name]
        if not self._rest or option.is_flag or option.count:
            return
        value = self._rest.pop(0)
        self.words.append(value)
        # In llama.cpp, --draft takes a number of tokens.
        if name == "--draft" and value.isdigit() and not named_path(value):
            hint = f"--draft-max {value} drafts {value} tokens at most"
            raise UsageError(f"--draft {value}: not a model", hint)

    def _take_hub_option(self, name: str, value: str) -> None:
        """Translate an option of `_HUB_MODELS`, or remember the value of one of `_HUB_DETAILS`."""
        from specgen.models.hub_names import parse_reference

        if name in _HUB_MODELS:
            self.words += [_HUB_MODELS[name], str(parse_reference(value))]
        elif _HUB_DETAILS[name] == "file":
            self.hub_file = value
        else:
            self.token = value

    def _ignore(self, name: str) -> None:
        """Drop an option, and the value of --color if it follows."""
        self.ignored.append(name)
        # Colours are the default, unless they are switched off.
        takes_value = name in ("--color", "-co")
        if takes_value and self._rest and self._rest[0] in ("on", "off", "auto"):
            value = self._rest.pop(0)
            if value == "off" and "--show" in self._own_options:
                self.words += ["--show", "none"]


def _with_hub_file(words: list[str], file: str) -> list[str]:
    """Replace the target, which is a repository on the hub, with a file in the repository.

    Raises:
        UsageError: If not exactly one target is on the hub.
    """
    target_indices = [
        index
        for index, word in enumerate(words)
        if word.startswith("hf:") and words[index - 1] == "-m"
    ]
    if len(target_indices) != 1:
        raise UsageError("--hf-file needs one --hf-repo", "name it with -hf USER/REPO")
    from specgen.models.hub_names import parse_reference

    (index,) = target_indices
    repository = words[index].split(":")[1]
    file_reference = str(parse_reference(f"{repository}/{file}"))
    return [*words[:index], file_reference, *words[index + 1 :]]
