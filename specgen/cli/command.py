"""What all commands have in common: the user's defaults, llama.cpp's spellings, and examples in the
help.

The defaults are in `config.toml` in the configuration folder. A key is the long name of an option,
without its dashes. Keys at the top are for every target; a table `[targets."NAME"]` is for one.
Environment variables and options of the command line come first.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import typer.core

from specgen.cli.llama_cpp_options import translated
from specgen.errors import UsageError
from specgen.system.files import read_toml

#: Typer's base of errors in the use of the command line; it has no public name.
COMMAND_LINE_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
_EXAMPLES = """
specgen run "Why is the sky blue?"
specgen run -hf Qwen/Qwen2.5-Coder-7B-Instruct-GGUF "Tell a story"
git diff | specgen run -m coder.gguf "Review this change"
specgen chat -m model.gguf --system "Be brief." --file notes.txt
specgen chat -m model.gguf --session work
specgen fim src/shapes.py:120:9 -m coder.gguf --in-place
specgen fim --prefix-file before --suffix-file after -m coder.gguf
specgen batch questions.jsonl answers.jsonl -m model.gguf --parallel 8
specgen serve -m model.gguf --port 8081 --parallel 2
specgen serve -m model.gguf --host 0.0.0.0 --api-key-file keys.txt
specgen verify -m model.gguf -md small.gguf
specgen tune -m model.gguf -md small.gguf
specgen bench -m model.gguf "Write a sort function" "Explain gravity"
specgen bench -m model.gguf -md small.gguf --prompts mine.jsonl --json report.json
specgen config -m model.gguf
specgen worker --host 0.0.0.0 --insecure-network
specgen doctor -m model.gguf
specgen models list --json
specgen models show qwen2.5-coder-1.5b
specgen models pull Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M
ls -l $(specgen models path qwen2.5-coder-1.5b)
specgen models rm Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M
specgen models quantize 0.5b-Q4_K_M.gguf 0.5b-Q4_0.gguf
specgen models clear
specgen draft find -m model.gguf small.gguf smaller.gguf --save
specgen draft make -m model.gguf --minutes 60
specgen draft make -m model.gguf --kind distilled -md small.gguf
specgen draft data -m model.gguf --tokens 80000
specgen draft learn -m model.gguf --minutes 30
specgen draft forget -m model.gguf
"""


def examples(command: str) -> list[str]:
    """Return what the help of a command ends with, by its own name, which no other has."""
    own = re.compile(rf"\bspecgen (?:models |draft )?{command}\b")
    return [line for line in _EXAMPLES.splitlines() if own.search(line)]


#: The commands that answer prompts: all defaults are theirs. The others, which measure or make
#: drafts, take only those of two panels, that name models and describe the machine.
_ANSWERING = ("run", "chat", "fim", "batch", "serve", "config")
_PANELS = ("Models", "Machine")
#: Options that say what is asked for, and not how, have no default in the file.
_NO_DEFAULTS = ("prompt", "file", "stop", "logprobs", "json", "verbose", "help")
#: What pydantic says of a value, which typer passes on, and how we say it.
_WORDS = (
    (r"Input should be a valid integer.*", "it is not a whole number"),
    (r"Input should be a valid number.*", "it is not a number"),
    (r"Input should be a valid boolean.*", "it is not true or false"),
    (r"Input should be greater than or equal to (\S+)", r"give \1 or more"),
    (r"Input should be less than or equal to (\S+)", r"give \1 or less"),
    (r"Value error, (.*?)\.?$", r"\1"),
)


def without_flag_types(parameters: Any) -> Any:
    for each in parameters:
        if getattr(each, "is_flag", False) or getattr(each, "count", False):
            each.metavar = ""
    return parameters


#: Of the headings that many commands share, the options that the short help shows; it shows all
#: that are a command's own.
_SHARED = re.compile(
    "Models|Answer|Constrained|Prompt|Drafting|Repetitions|Other texts|Sampling|Machine|Learning|Output|Server|Limits"
)
_USUAL = re.compile(
    "--(target|draft|max-tokens|temp|seed|ctx-size|threads|gpu-layers|policy|system|prompt|file|json-schema|show|stats"
    "|json|port|host)$"
)
#: A command with no more options has no short help.
_FEW = 20


class Command(typer.core.TyperCommand):
    """A command whose options have the user's defaults. Its help is plain text, in which no name is
    cut: the usual options with a sentence each, or all with `--help-all`.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        names = {"help_option_names": ["-h", "--help", "--help-all"], "max_content_width": 100}
        super().__init__(*arguments, **(settings | {"context_settings": names}))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shown = [
            each for each in self.get_params(ctx) if "--help" not in each.opts and not each.hidden
        ]
        is_whole = ctx.meta.get("help") == "--help-all" or len(shown) <= _FEW
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in shown:
            heading = each.rich_help_panel or "Options"
            is_argument = each.param_type_name == "argument"
            is_rare = _SHARED.match(heading) and not _USUAL.match(each.opts[0])
            if is_rare and not is_argument and not is_whole:
                continue
            names, text = each.get_help_record(ctx)
            if is_argument:
                names, text = each.metavar or each.name.upper(), text.removesuffix(".")
            elif not is_whole:
                short = [name for name in each.opts if not name.startswith("--")][:1]
                names = ", ".join([*short, "/".join([each.opts[0], *each.secondary_opts])])
                names = f"{names} {each.metavar or ''}".rstrip()
                text = re.split(r"[.:] ", each.help or "")[0].removesuffix(".")
            panels.setdefault(heading if is_whole else "Options", []).append((names, text))
        for heading, rows in panels.items():
            with formatter.section(heading):
                formatter.write_dl(rows, col_max=26)
        if not is_whole:
            formatter.write_paragraph()
            formatter.write_text(f"`{ctx.command_path} --help-all` shows all {len(shown)} options.")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in examples(self.name or "-")))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["help"] = "--help-all" if "--help-all" in args else "--help"
        if not ctx.resilient_parsing:
            args = translated(ctx, args)
            try:
                given, behind, _ = self.make_parser(ctx).parse_args(args=list(args))
                if (model := _model_given_first(ctx, given, behind)) is not None:
                    places = [at for at, word in enumerate(args) if word == model]
                    # It may be the value of an option as well.
                    alone = [at for at in places if at == 0 or not args[at - 1].startswith("-")]
                    at = (alone or places)[0]
                    args = [*args[:at], "--target", *args[at:]]
                    given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            except COMMAND_LINE_ERROR as error:
                error.ctx = ctx  # type: ignore[attr-defined]
                raise
            eager = [each.name for each in self.get_params(ctx) if each.is_eager]
            if not any(given.get(name) for name in eager):  # no help is asked for
                ctx.default_map = user_defaults(ctx, given)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> Any:
        return without_flag_types(super().get_params(ctx))


def _model_given_first(ctx: Any, given: Mapping[str, Any], behind: Sequence[str]) -> str | None:
    """Return the first argument if it is a GGUF file, a word like one's name, or a model's name in
    the registry, and no target is given: other tools take the model there. `behind` are the
    arguments for which the command has no parameter.
    """
    parameters = ctx.command.params
    targets = [each.name for each in parameters if "--target" in each.opts]
    is_part = ctx.parent is not None and ctx.parent.parent is not None  # such as `draft find`
    if is_part or not targets or given.get(targets[0]):
        return None
    values = [given.get(each.name) for each in parameters if each.param_type_name == "argument"]
    words = [
        word for each in values if each for word in ([each] if isinstance(each, str) else each)
    ]
    first = next(iter([*words, *behind]), "")
    is_file = first.endswith(".gguf") and Path(first).is_file()
    if is_file or re.fullmatch(r"\S+\.gg\w+", first):  # a misspelt name is told at once
        return first
    if "-" not in first or not re.fullmatch(r"[\w.-]+", first):
        return None
    from specgen.models.registry import load_registry

    return first if first in load_registry().models else None


def in_words(message: str) -> str:
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    return message


# --- the user's defaults


def config_file() -> Path:
    from specgen.system.folders import config_folder

    return config_folder() / "config.toml"


def option_keys(parameter: Any) -> list[str]:
    """Return the keys of an option in the file, its readable spelling first; none if it has no
    default there.
    """
    names = [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]
    is_constraint = getattr(parameter, "rich_help_panel", None) == "Constrained answers"
    is_out = parameter.param_type_name != "option" or parameter.is_eager or is_constraint
    return [] if is_out or names[:1] == [] or names[0] in _NO_DEFAULTS else names


def user_defaults(context: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's defaults for a command, by its parameters, beside what the command line has
    `given`.
    """
    path = config_file()
    if not path.exists() or not (document := read_toml(path)):
        return {}
    root = context.find_root().command
    root.load(*_ANSWERING)
    known = {
        key: each
        for name in reversed(_ANSWERING)
        for each in root.commands[name].params
        for key in option_keys(each)
    }
    own = {key: each for each in context.command.params for key in option_keys(each)}
    tables = document.pop("targets", {})
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise UsageError(f'{path}: targets: give tables, as in [targets."NAME"]')
    profiles = {
        name: _entries(f'{path}: targets."{name}".', table, known) for name, table in tables.items()
    }
    found = _entries(f"{path}: ", document, known)
    names = {}  # of the target and the pair
    for key in ("target", "pair"):
        value = given.get(own[key].name) if key in own else None
        names[key] = value[0] if isinstance(value, (list, tuple)) and value else value
    if any(names.values()) and found.keys() & names.keys():
        for key in ("target", "pair", "draft"):  # the file's draft is for the file's target
            found.pop(key, None)
    target, pair = (names[key] or found.get(key, ("", None))[1] for key in names)
    found |= _profile(profiles, target, pair)
    values = {
        key: checked(where, value, own.get(key, known[key]), context)
        for key, (where, value) in found.items()
    }
    takes_all = context.command.name in _ANSWERING
    return {
        own[key].name: value
        for key, value in values.items()
        if key in own and (takes_all or own[key].rich_help_panel in _PANELS)
    }


def _entries(
    where: str, table: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, tuple[str, Any]]:
    """Return the values of a table with their places, by the options' readable spellings."""
    found = {}
    for key, value in table.items():
        option = known.get(key.replace("_", "-"))
        if option is None:
            near = difflib.get_close_matches(key.replace("_", "-"), [*known, "targets"], n=1)
            hint = f"the nearest one is {near[0]}" if near else "`specgen config` lists the keys"
            raise UsageError(f"{where}{key}: there is no such key", hint=hint)
        found[option_keys(option)[0]] = (f"{where}{key}", value)
    return found


def checked(where: str, value: Any, option: Any, context: Any) -> Any:
    """Return a value as it would be on the command line. `where` names it."""
    values = value if isinstance(value, list) else [value]
    texts = [str(each).lower() if isinstance(each, bool) else str(each) for each in values]
    try:
        if len(texts) != 1 and not option.multiple:
            raise typer.BadParameter("give one value")
        found = texts if option.multiple else texts[0]
        option.process_value(context, found)
    except typer.BadParameter as error:
        raise UsageError(f"{where} = {', '.join(texts)}: {in_words(error.message)}") from None
    return found


def _profile(tables: Mapping[str, Any], target: Any, pair: Any) -> Any:
    """Return the table for a target as it was given, for its file's name, or that without its
    suffix.
    """
    if tables and target is None:
        from specgen.models.registry import load_registry

        registry = load_registry()
        known = registry.pairs.get(pair or registry.default_pair)
        target = "" if known is None else known.target
    names = (str(target), Path(str(target)).name, Path(str(target)).stem)
    return next((table for name, table in tables.items() if name in names), {})
