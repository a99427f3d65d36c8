"""The user's defaults of options, from `config.toml` in the configuration folder.

A key is the long name of an option, without its dashes. Keys at the top are for every target; a
table `[targets."NAME"]` is for one. Environment variables and the command line take precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import typer

from specgen.cli.typer_messages import reason
from specgen.errors import UsageError, did_you_mean
from specgen.models.own_folders import FOLDERS_KEY, model_folders
from specgen.system.files import named_path, read_toml

#: Commands that answer prompts, and the one that shows their options, take all defaults.
_ANSWERING_COMMANDS = ("run", "chat", "fim", "batch", "serve", "config")
#: The other commands measure or make drafts. They take the defaults of options under these
#: headings of the help only, which name models and describe the machine.
_SHARED_PANELS = ("Models", "Machine")
#: Options about a single call, which cannot have a default in the file.
_NO_DEFAULTS = ("prompt", "file", "stop", "logprobs", "json", "verbose", "help")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A value in the file."""

    #: The file and the key, for messages.
    where: str
    #: The value, in the type that TOML gave it.
    value: Any


#: The values in a table of the file, by the options' readable spellings.
_Entries: TypeAlias = dict[str, _Entry]


def config_file() -> Path:
    """Return the path of the file, which need not exist."""
    from specgen.system.folders import config_folder

    return config_folder() / "config.toml"


def option_keys(parameter: Any) -> list[str]:
    """Return the keys that set an option in the file, its readable spelling first.

    The list is empty if the parameter is not an option, or cannot be set in the file.
    """
    if parameter.param_type_name != "option" or parameter.is_eager:
        return []
    if parameter.rich_help_panel == "Constrained answers":
        return []
    names = [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]
    if names[0] in _NO_DEFAULTS:
        return []
    return names


def user_defaults(context: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's defaults for a command, by the names of its parameters.

    Args:
        context: Typer's context of the command.
        given: The values on the command line, by the names of the command's parameters.

    Raises:
        UsageError: If anything in the file is wrong, even if it does not concern this command.
    """
    path = config_file()
    if named_path(path) is None:
        return {}
    document = read_toml(path)
    if not document:
        return {}
    command = context.command
    all_options = _options_of_all_commands(context)
    own_options = _options_by_key(command)
    model_folders()  # raises if the file does not list them as it should
    top_entries, entries_by_target = _read_entries(document, path, all_options)
    target = _value_given(given, own_options.get("target"))
    pair = _value_given(given, own_options.get("pair"))
    entries = _entries_for_models(top_entries, entries_by_target, target, pair)

    takes_all = command.name in _ANSWERING_COMMANDS
    defaults = {}
    for key, entry in entries.items():
        # Values of other commands' options are checked, too: any mistake is reported at once.
        option = own_options.get(key, all_options[key])
        value = checked(entry.where, entry.value, option, context)
        if key in own_options and (takes_all or option.rich_help_panel in _SHARED_PANELS):
            defaults[option.name] = value
    return defaults


def checked(
    where: str,
    value: Any,
    option: Any,
    context: Any,
) -> Any:
    """Convert a value from a TOML file as Typer converts one from the command line.

    Args:
        where: The name of the value in messages.
        value: The value, in the type that TOML gave it.
        option: Typer's option.
        context: The context of the option's command.

    Raises:
        UsageError: If the option does not accept the value.
    """
    values = value if isinstance(value, list) else [value]
    texts = [_text_of(item) for item in values]  # Typer converts texts only
    try:
        if option.multiple:
            return option.process_value(context, texts)
        if len(texts) != 1:
            raise typer.BadParameter("give one value")
        return option.process_value(context, texts[0])
    except typer.BadParameter as error:
        why = reason(error)
        if why is None:
            why = f"{error.message}, not {', '.join(texts)}"
        raise UsageError(f"{where}: {why}") from None


def _text_of(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()  # as TOML spells it
    return str(value)


def _options_of_all_commands(context: Any) -> dict[str, Any]:
    """Return all options that the file can set, by their keys."""
    root = context.find_root().command
    root.load(*_ANSWERING_COMMANDS)
    options: dict[str, Any] = {}
    # Where commands declare a key differently, the declaration of the first command is used.
    for name in reversed(_ANSWERING_COMMANDS):
        options |= _options_by_key(root.commands[name])
    return options


def _options_by_key(command: Any) -> dict[str, Any]:
    return {key: option for option in command.params for key in option_keys(option)}


def _value_given(given: Mapping[str, Any], option: Any) -> Any:
    """Return an option's value on the command line; None if it is not given there.

    Args:
        given: The values on the command line, by the names of the parameters.
        option: Typer's option; None if the command does not have it.
    """
    if option is None:
        return None
    return given.get(option.name)


def _read_entries(
    document: Mapping[str, Any],
    path: Path,
    options: Mapping[str, Any],
) -> tuple[_Entries, dict[str, _Entries]]:
    """Return the entries at the top of the file, and those of each target's table.

    Args:
        document: The content of the file.
        path: The file, for messages.
        options: All options that the file can set, by their keys.
    """
    top = dict(document)
    top.pop(FOLDERS_KEY, None)  # no option: `model_folders` reads and checks it
    tables = top.pop("targets", {})
    if not isinstance(tables, dict) or not all(isinstance(item, dict) for item in tables.values()):
        raise UsageError(f'{path}: targets: give tables, as in [targets."NAME"]')
    entries_by_target = {
        name: _table_entries(table, f'{path}: targets."{name}".', options)
        for name, table in tables.items()
    }
    return _table_entries(top, f"{path}: ", options), entries_by_target


def _table_entries(
    table: Mapping[str, Any],
    message_prefix: str,
    options: Mapping[str, Any],
) -> _Entries:
    """Return the entries of a table.

    Args:
        table: The table.
        message_prefix: What messages put before a key of the table.
        options: All options that the file can set, by their keys.

    Raises:
        UsageError: If there is no such option.
    """
    entries = {}
    for key, value in table.items():
        where = f"{message_prefix}{key}"
        spelling = key.replace("_", "-")
        if spelling not in options:
            suggestion = did_you_mean(spelling, [*options, "targets"])
            hint = "`specgen config` lists the keys that most commands take"
            raise UsageError(f"{where}: there is no such key{suggestion}", hint)
        # Two spellings of an option set the same entry.
        readable = option_keys(options[spelling])[0]
        entries[readable] = _Entry(where, value)
    return entries


def _entries_for_models(
    top_entries: _Entries,
    entries_by_target: Mapping[str, _Entries],
    target: str | None,
    pair: str | None,
) -> _Entries:
    """Return the entries that apply to the models in use.

    Args:
        top_entries: The entries for every target.
        entries_by_target: The entries of each target's table, which take precedence.
        target: The target that the command line names, if any; otherwise the file's is used.
        pair: The pair that the command line names, likewise.
    """
    entries = top_entries
    if not target and not pair:
        target = _value(entries, "target")
        pair = _value(entries, "pair")
    elif "target" in entries or "pair" in entries:
        # The command line replaces the file's models. The file's draft goes with its target.
        model_keys = ("target", "pair", "draft")
        entries = {key: entry for key, entry in entries.items() if key not in model_keys}
    if not entries_by_target:
        return entries
    if target is None:
        target = _target_of_pair(pair)
    # A table is named after the target as it was given, or its file, with or without the suffix.
    path = Path(str(target))
    for name, table in entries_by_target.items():
        if name in (str(target), path.name, path.stem):
            return entries | table
    return entries


def _target_of_pair(pair: str | None) -> str:
    """Return the target of a pair, or of the default pair; "" if there is no such pair."""
    from specgen.models.registry import load_registry

    registry = load_registry()
    known_pair = registry.pairs.get(pair or registry.default_pair)
    if known_pair is None:
        return ""
    return known_pair.target


def _value(entries: _Entries, key: str) -> Any:
    if key not in entries:
        return None
    return entries[key].value
