"""Options of llama.cpp's programs that are typed out of habit: what specgen does anyhow is left
out, with one note; what has an equal is replaced by it; the others are refused, with what to use
instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgen.errors import UsageError

#: Options without a value that change nothing here: for all commands (""), and for some.
_SAME = {
    "": "--jinja --color -co --no-display-prompt --warmup --no-warmup --mmap --no-context-shift --no-escape "
    "--log-disable --no-perf --no-show-timings --repack --kv-offload -kvo --op-offload --no-mmproj "
    "--cont-batching -cb --cache-prompt",
    "run": "--single-turn -st",
    "chat": "--conversation -cnv --interactive -i --interactive-first -if --multiline-input -mli",
    "serve": "--metrics --props --slots --webui --ui",
}
#: Our equals of llama.cpp's options, which keep a value behind them.
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
_EQUAL = {name: equal.split() for equal, names in _EQUALS.items() for name in names.split()}
#: What to use instead, by the spellings.
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
    "-bf --binary-file --prompt-cache-all --prompt-cache-ro -ot -cmoe -ncmoe -nkvo -mg -sm -dev -devd -ctxcp -cram -kvu -ptc -sp -nocb -dt -gan -gaw -mm -bs -lcd "
    "-sps -nr": "",
}
_INSTEAD = {name: hint for names, hint in _HINTS.items() for name in names.split()}
#: What names models on the hub, by the option that takes a name as hf:USER/REPO:QUANT.
_HUB = {
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "-m"),
    **dict.fromkeys(("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"), "-md"),
}
_HUB_OTHERS = {"-hff": "file", "--hf-file": "file", "-hft": "token", "--hf-token": "token"}


def translated(context: Any, arguments: Sequence[str]) -> list[str]:
    """Return a command line without llama.cpp's own options. Raise `UsageError` for one that has no
    equal.
    """
    command = context.command
    own = {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)}
    same = {*_SAME[""].split(), *_SAME.get(command.name, "").split()}
    found: list[str] = []
    left_out: list[str] = []
    others: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            found += [word, *rest]
            break
        if name in own:
            found.append(word)
            if rest and not (equals or own[name].is_flag or getattr(own[name], "count", False)):
                _check_draft(name, rest[0])
                found.append(rest.pop(0))
        elif _HUB.get(name) in own or name in _HUB_OTHERS:
            value = value if equals or not rest else rest.pop(0)
            if name in _HUB:
                from specgen.models.hub_names import parse_reference

                found += [_HUB[name], str(parse_reference(value))]
            others[_HUB_OTHERS.get(name, "")] = value
        elif name in same:
            left_out.append(name)
            if name in ("--color", "-co") and rest[:1] in (["on"], ["off"], ["auto"]):
                found += ["--show", "none"] if rest.pop(0) == "off" and "--show" in own else []
        elif name in _EQUAL and _EQUAL[name][0] in own:
            found += [*_EQUAL[name], *([value] if equals else [])]
        elif name in _INSTEAD or name in _EQUAL:
            raise UsageError(
                f"{name} is an option of llama.cpp that `{context.command_path}` does not have",
                hint=_INSTEAD.get(name) or f"`{context.command_path} --help-all` has all options",
            )
        else:
            found.append(word)
    if left_out and not {"-q", "--quiet"} & {*arguments}:
        names = ", ".join(dict.fromkeys(left_out))
        print(f"note: {names}: not needed, specgen does so anyhow", file=sys.stderr)
    os.environ.update({"HF_TOKEN": others["token"]} if "token" in others else {})
    return _with_file(found, others.get("file"))


def _with_file(words: list[str], file: str | None) -> list[str]:
    """Return the words with the file in the target's repository, if there is one, as the target."""
    if file is None:
        return words
    names = [
        at for at, word in enumerate(words) if word.startswith("hf:") and words[at - 1] == "-m"
    ]
    if len(names) != 1:
        raise UsageError("--hf-file needs one --hf-repo", "name it with -hf USER/REPO")
    from specgen.models.hub_names import parse_reference

    name = parse_reference(f"{words[names[0]].split(':')[1]}/{file}")
    return [*words[: names[0]], str(name), *words[names[0] + 1 :]]


def _check_draft(name: str, value: str) -> None:
    """Raise `UsageError` for a number of tokens, which llama.cpp's --draft takes."""
    if name == "--draft" and value.isdigit() and not Path(value).exists():
        hint = f"--draft-max {value} drafts {value} tokens at most"
        raise UsageError(f"--draft {value}: that is no model", hint)
