"""Options of llama.cpp's programs that specgen does not have, or has by another name.

Whoever comes from llama.cpp types them out of habit. Those that ask for what specgen does anyhow are left out, with one
note; those that have an equal are replaced by it; the others are refused, with what to use instead.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specgen.errors import UsageError

#: Options without a value that change nothing here, for all commands and for some.
_SAME = (
    *("--jinja", "--color", "-co", "--no-display-prompt", "--warmup", "--no-warmup", "--mmap"),
    *("--no-context-shift", "--no-escape", "--log-disable", "--no-perf", "--no-show-timings"),
    *("--repack", "--kv-offload", "-kvo", "--op-offload", "--no-mmproj"),
    *("--cont-batching", "-cb", "--cache-prompt"),
)
_SAME_IN: Mapping[str, Sequence[str]] = {
    "run": ("--single-turn", "-st"),
    "chat": (
        *("--conversation", "-cnv", "--interactive", "-i", "--interactive-first", "-if"),
        *("--multiline-input", "-mli"),
    ),
    "serve": ("--metrics", "--props", "--slots", "--webui", "--ui"),
}
#: An option's equal here. An option with `=` or a value behind it keeps that.
_EQUAL: Mapping[str, Sequence[str]] = {
    "--system-prompt": ("--system",),
    "--n-gpu-layers": ("--gpu-layers",),
    "--n-gpu-layers-draft": ("--gpu-layers-draft",),
    "--spec-draft-ngl": ("--gpu-layers-draft",),
    "--spec-draft-model": ("--draft",),
    "--spec-draft-hf": ("--hf-repo-draft",),
    "--spec-draft-n-max": ("--draft-max",),
    "--spec-draft-n-min": ("--draft-min",),
    "--spec-draft-p-min": ("--draft-p-min",),
    "--draft-n-min": ("--draft-min",),
    "--mtp": ("--draft", "mtp"),
    "--no-conversation": ("--raw",),
    "-no-cnv": ("--raw",),
    "--in-file": ("--file",),
    "--perf": ("--stats",),
    "--show-timings": ("--stats",),
    "--simple-io": ("--show", "none"),
    "--log-verbose": ("--verbose",),
}
_CHAT = "`specgen chat` is a conversation; `specgen run` answers one prompt"
_THREADS = "-t and -tb are for the draft, too"
_COLD = "leave it out: specgen measures how many threads are best, and the system places them"
_TEMPLATE = (
    "specgen uses the model's own template; --raw continues a text in which you wrote one yourself"
)
_LOG = "-v and -vv say more on standard error; `2> FILE` keeps it"
_MEMORY = (
    "leave it out: specgen maps the file, and keeps the weights that its kernels read in memory"
)
_RUN = "`specgen run` answers one prompt"
#: What to use instead.
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("-ub", "--ubatch-size"), "-b N is how many prompt tokens are decoded at once"),
    **dict.fromkeys(("-e", "--escape"), r"write line breaks as the shell does: $'one\ntwo'"),
    **dict.fromkeys(
        (
            *("-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first"),
            *("-mli", "--multiline-input"),
        ),
        _CHAT,
    ),
    **dict.fromkeys(("-st", "--single-turn", "-no-cnv", "--no-conversation"), _RUN),
    "--display-prompt": "specgen prints only the answer",
    "--verbose-prompt": "--json shows the prompt as the model sees it",
    **dict.fromkeys(("--no-mmap", "--mlock", "-lm", "--load-mode"), _MEMORY),
    **dict.fromkeys(
        ("-sysf", "--system-prompt-file"), '--system "$(cat FILE)" takes it from a file'
    ),
    **dict.fromkeys(("-bf", "--binary-file"), "-f FILE reads a text in UTF-8"),
    **dict.fromkeys(
        ("-td", "--threads-draft", "-tbd", "--threads-batch-draft", "--spec-draft-threads"),
        _THREADS,
    ),
    **dict.fromkeys(("-ctkd", "-ctvd"), "-ctk and -ctv are for the draft, too"),
    **dict.fromkeys(
        ("-C", "-Cr", "--cpu-mask", "--cpu-range", "--cpu-strict", "--prio", "--poll", "--numa"),
        _COLD,
    ),
    **dict.fromkeys(("--chat-template", "--chat-template-file", "--no-jinja"), _TEMPLATE),
    **dict.fromkeys(
        ("--log-file", "-lv", "--verbosity", "--log-verbosity", "--log-colors", "--log-prefix"),
        _LOG,
    ),
    **dict.fromkeys(
        ("--keep", "--context-shift"),
        "an answer ends where the context is full: -c N makes it larger",
    ),
    **dict.fromkeys(
        ("--prompt-cache-all", "--prompt-cache-ro"), "--prompt-cache FILE keeps the prompt"
    ),
    "--spec-type": "--draft says what drafts: a model, mtp, ngram or heads",
    **dict.fromkeys(("-mu", "--model-url"), "download it, or name it with -hf USER/REPO:QUANT"),
    "--api-key": "--api-key-file FILE: other users of the machine can see options",
    **dict.fromkeys(
        ("-to", "--timeout"), "--limit-time SECONDS is the most that an answer may take"
    ),
    **dict.fromkeys(("--ssl-key-file", "--ssl-cert-file"), "put a proxy with TLS in front of it"),
    "--offline": "the variable HF_HUB_OFFLINE=1 does so",
    # Without these, the first letter would count as an option and the rest as its value.
    **dict.fromkeys(
        (
            *("-ot", "-cmoe", "-ncmoe", "-nkvo", "-mg", "-sm", "-dev", "-devd", "-ctxcp", "-cram"),
            *("-kvu", "-ptc", "-sp", "-nocb", "-dt", "-gan"),
            *("-gaw", "-mm", "-bs", "-lcd", "-sps", "-nr"),
        ),
        "",
    ),
}


def translated(context: Any, arguments: Sequence[str]) -> list[str]:
    """Return a command line without llama.cpp's own options, which are replaced or left out, with a note on standard
    error. Raise `UsageError` for one that has no equal."""
    command = context.command
    own = {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)}
    same = {*_SAME, *_SAME_IN.get(command.name, ())}
    found: list[str] = []
    left_out: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return _noted([*found, word, *rest], left_out, arguments)
        name, equals, value = word.partition("=")
        if name in own:
            found.append(word)
            if not equals and _takes_value(own[name]) and rest:
                _check_draft(name, rest[0])
                found.append(rest.pop(0))
        elif name in ("--color", "-co") and rest[:1] in (["on"], ["off"], ["auto"]):
            is_off = rest.pop(0) == "off"
            found += ["--show", "none"] if is_off and "--show" in own else []
            left_out += [] if is_off else [name]
        elif name in same:
            left_out.append(name)
        elif name in _EQUAL and _EQUAL[name][0] in own:
            found += [*_EQUAL[name], *([value] if equals else [])]
        elif name in _INSTEAD or name in _EQUAL:
            raise UsageError(
                f"{name} is an option of llama.cpp that `{context.command_path}` does not have",
                hint=_INSTEAD.get(name) or f"`{context.command_path} --help` has all options",
            )
        else:
            found.append(word)
    return _noted(found, left_out, arguments)


def _takes_value(option: Any) -> bool:
    return not option.is_flag and not getattr(option, "count", False)


def _check_draft(name: str, value: str) -> None:
    """Raise `UsageError` for a number of tokens, which llama.cpp's --draft takes."""
    if name == "--draft" and value.isdigit() and not Path(value).exists():
        raise UsageError(
            f"--draft {value}: that is no model",
            hint=f"--draft-max {value} drafts {value} tokens at most",
        )


def _noted(found: list[str], left_out: list[str], arguments: Sequence[str]) -> list[str]:
    if left_out and not {"-q", "--quiet"} & {*arguments}:
        names = ", ".join(dict.fromkeys(left_out))
        print(f"note: {names}: not needed, specgen does so anyhow", file=sys.stderr)
    return found
