"""The user's defaults: `config.toml` in the configuration folder.

A key is the long name of an option of the commands, without its dashes. Keys at the top are for every target; a
table `[targets."NAME"]` is for one. Environment variables and options of the command line come first.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specgen.errors import UsageError
from specgen.system.files import read_toml

#: The commands that answer prompts: all defaults are theirs. The others, which measure or make drafts, take
#: only those that name models and describe the machine.
ANSWERING = ("run", "chat", "fim", "batch", "serve", "config")
_PANELS = ("Models", "Machine")
#: Options that say what is asked for, and not how, have no default in the file.
_NO_DEFAULTS = ("prompt", "file", "stop", "logprobs", "json", "verbose", "help")
_NO_PANELS = ("Constrained answers",)
#: The table of targets.
_TARGETS = "targets"
#: Of these options, one that is given takes the place of all.
_RIVALS = (("target", "pair"), ("samplers", "sampler-seq"))
#: What pydantic says of a value, which typer passes on, and how we say it.
_WORDS = (
    (r"Input should be a valid integer.*", "it is not a whole number"),
    (r"Input should be a valid number.*", "it is not a number"),
    (r"Input should be greater than or equal to (\S+)", r"give \1 or more"),
    (r"Input should be less than or equal to (\S+)", r"give \1 or less"),
    (r"Value error, (.*?)\.?$", r"\1"),
)


def in_words(message: str) -> str:
    """Return what is wrong with a value in plain words."""
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    return message


def config_file() -> Path:
    """Return the path of the user's defaults; the file need not exist."""
    from specgen.models.files import config_folder

    return config_folder() / "config.toml"


def option_keys(parameter: Any) -> list[str]:
    """Return the keys of an option in the file, its readable spelling first; none if it has no default there."""
    names = [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]
    panel = getattr(parameter, "rich_help_panel", None)
    is_out = parameter.param_type_name != "option" or parameter.is_eager or panel in _NO_PANELS
    return [] if is_out or names[:1] == [] or names[0] in _NO_DEFAULTS else names


def defaults_for(context: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's defaults for a command, by the names of its parameters. `given` are the values of the
    command line. Raise `UsageError` if a key or a value of the file is wrong."""
    path = config_file()
    document = read_toml(path, is_optional=True)
    if not document:
        return {}
    known = _known_options(context)
    own = {key: each for each in context.command.params for key in option_keys(each)}
    tables = document.pop(_TARGETS, {})
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise UsageError(f'{path}: {_TARGETS}: give tables, as in [{_TARGETS}."NAME"]')
    found = _entries(f"{path}: ", document, known)
    profiles = {
        name: _entries(f'{path}: {_TARGETS}."{name}".', table, known)
        for name, table in tables.items()
    }

    def named(key: str) -> Any:
        """Return what the command line gives for an option."""
        value = given.get(own[key].name) if key in own else None
        return value[0] if isinstance(value, (list, tuple)) and value else value

    has_target = "target" in found or "pair" in found
    if has_target and (named("target") is not None or named("pair") is not None):
        for key in ("target", "pair", "draft"):  # the file's draft is for the file's target
            found.pop(key, None)
    target, pair = (named(key) or found.get(key, ("", None))[1] for key in ("target", "pair"))
    found |= profiles.get(_profile(profiles, target, pair), {})
    for rivals in _RIVALS:
        if any(named(key) is not None for key in rivals):
            found = {key: entry for key, entry in found.items() if key not in rivals}
    checked = {
        key: _check_value(where, value, own.get(key, known[key]), context)
        for key, (where, value) in found.items()
    }
    takes_all = context.command.name in ANSWERING
    return {
        own[key].name: value
        for key, value in checked.items()
        if key in own and (takes_all or own[key].rich_help_panel in _PANELS)
    }


def _known_options(context: Any) -> dict[str, Any]:
    """Return the options that may have a default, by all their keys."""
    root = context.find_root().command
    root.load(*ANSWERING)
    return {
        key: parameter
        for name in reversed(ANSWERING)
        for parameter in root.commands[name].params
        for key in option_keys(parameter)
    }


def _entries(
    where: str, table: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, tuple[str, Any]]:
    """Return the values of a table with their places, by the options' readable spellings. Raise `UsageError`
    for an unknown key."""
    found = {}
    for key, value in table.items():
        option = known.get(key.replace("_", "-"))
        if option is None:
            near = difflib.get_close_matches(key.replace("_", "-"), [*known, _TARGETS], n=1)
            hint = f"the nearest one is {near[0]}" if near else "`specgen config` lists the keys"
            raise UsageError(f"{where}{key}: there is no such key", hint=hint)
        found[option_keys(option)[0]] = (f"{where}{key}", value)
    return found


def _check_value(where: str, value: Any, option: Any, context: Any) -> Any:
    """Return a value as it would be on the command line. `where` names it. Raise `UsageError` if it is wrong."""
    import typer

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


def _profile(tables: Mapping[str, Any], target: Any, pair: Any) -> str:
    """Return the name of the table for the target, which it may name as it was given, by its file's name, or
    without its suffix; empty without one."""
    if tables and target is None:
        from specgen.models.registry import load_registry

        registry = load_registry()
        known = registry.pairs.get(pair or registry.default_pair)
        target = None if known is None else known.target
    path = Path(str(target))
    names = () if target is None else (str(target), path.name, path.stem)
    return next((name for name in tables if name in names), "")
