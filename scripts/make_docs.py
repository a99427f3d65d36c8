"""Write the generated part of docs/ from the sources. `--check` only reports what is out of date.

- docs/cli.md: the options of all commands, from specgen/cli;
- docs/events.md, docs/events.schema.json: from specgen/events.py, whose `#:` comments are the
  descriptions of the fields below them;
- docs/exit-codes.md: from specgen/errors.py;
- docs/models.md: from benchmarks/results/architectures.jsonl, which `make architectures` writes.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import re
import sys
import tokenize
import types
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, Literal, TypeAlias

from scripts import models_page
from scripts.wrap_markdown import wrapped
from specgen import errors, events
from specgen.events import REASONS

ROOT = Path(__file__).resolve().parent.parent

#: A dataclass of events.py.
Record: TypeAlias = type[Any]
JsonSchema: TypeAlias = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the generated part of docs/.")
    parser.add_argument("--check", action="store_true", help="only report what is out of date")
    check: bool = parser.parse_args().check
    stale = {path: text for path, text in pages().items() if is_stale(path, text)}
    for path, text in stale.items():
        if check:
            sys.stdout.writelines(difference(path, text))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            print(f"wrote {path.relative_to(ROOT)}")
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"out of date: {names}\nhint: run make docs")


def pages() -> dict[Path, str]:
    """The content of each generated file."""
    docs = ROOT / "docs"
    return {
        docs / "cli.md": cli_page(),
        docs / "events.md": events_page(),
        docs / "events.schema.json": json.dumps(events_schema(), indent=2) + "\n",
        docs / "exit-codes.md": exit_codes_page(),
        docs / "models.md": page(
            "Supported models", "benchmarks/results/architectures.jsonl", *models_page.parts()
        ),
    }


def is_stale(path: Path, text: str) -> bool:
    return not path.exists() or path.read_text(encoding="utf-8") != text


def difference(path: Path, text: str) -> Iterator[str]:
    """A unified diff from the content of the file to what it should be."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    name = str(path.relative_to(ROOT))
    return difflib.unified_diff(
        before.splitlines(keepends=True), text.splitlines(keepends=True), name, f"{name} (new)"
    )


def page(title: str, source: str, *parts: str) -> str:
    note = f"<!-- Written by `make docs` from {source}: change that, not this file. -->"
    return wrapped(
        "\n\n".join([note, f"# {title}", *(part.strip("\n") for part in parts if part)]) + "\n"
    )


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


# --- the command line -----------------------------------------------------------------------

#: The options and arguments of a command, by the heading of their group in its help. Each group has
#: a Markdown list item for each option, by its first spelling.
Panels: TypeAlias = dict[str, dict[str, str]]
#: The headings of options that are not in a group.
OWN = ("Arguments", "Options")


def cli_page() -> str:
    """The page about all commands and their options."""
    from specgen.cli.app import command_line

    introduction = (
        "Below each command are the options that only it takes. Options that several commands "
        "take are described once, under [Shared options](#shared-options), in groups; each command "
        "names the groups that it takes. In a list, each option is followed by its other "
        "spellings, its values and, in brackets, its default. On the command line, `--help` shows "
        "a command's usual options, and `--help-all` all of them. `specgen --install-completion` "
        "lets your shell complete commands, options and names of models. You can set "
        "[your own defaults](using.md#your-defaults) in a file."
    )
    return page(
        "The command line",
        "specgen/cli",
        introduction,
        *command_sections(command_line(), "specgen"),
    )


def command_sections(root: Any, program: str) -> Iterator[str]:
    """Yield the parts of a section for each command, and of one for the options that they share.

    The section of a command contains its help, its usage, its subcommands, its own options, and the
    shared options that it takes.
    """
    taken = {name: panels(command) for name, command in commands(root, program)}
    shared = shared_options(taken.values())
    for name, command in commands(root, program):
        yield f"## {name}"
        yield prose_of(command)
        yield usage(name, command)
        subcommands = getattr(command, "commands", {})
        if subcommands:
            links = (f"[`{word}`](#{anchor(f'{name} {word}')})" for word in subcommands)
            yield f"Commands: {', '.join(links)}."
        shared_items = {item for items in shared.values() for item in items.values()}
        items_taken = [item for items in taken[name].values() for item in items.values()]
        yield "\n".join(item for item in items_taken if item not in shared_items)
        yield shared_taken(shared, items_taken)
    if shared:
        yield "## Shared options"
    for panel, items in shared.items():
        yield f"### {panel}"
        yield "\n".join(items.values())


def shared_options(taken: Iterable[Panels]) -> Panels:
    """The options under each heading that more than one command takes in the same way."""
    shared: Panels = {}
    counts = Counter(
        (panel, spelling, item)
        for each in taken
        for panel, items in each.items()
        for spelling, item in items.items()
        if panel not in OWN
    )
    for (panel, spelling, item), n_commands in counts.items():
        if n_commands > 1:
            shared.setdefault(panel, {}).setdefault(spelling, item)
    return shared


def shared_taken(shared: Panels, taken: Sequence[str]) -> str:
    """Describe in as few words as possible which of the shared options a command takes.

    It lists the groups from which the command takes all options, or those from which it takes none,
    whichever are fewer. Where it takes only some options of a group, it lists them.
    """
    complete = []
    none = []
    parts = []
    for panel, items in shared.items():
        link = f"[{panel}](#{anchor(panel)})"
        has = [f"`{spelling}`" for spelling, item in items.items() if item in taken]
        lacks = [f"`{spelling}`" for spelling, item in items.items() if item not in taken]
        if not lacks:
            complete.append(link)
        elif not has:
            none.append(link)
        elif len(lacks) > len(has):
            parts.append(f"of {link} {', '.join(has)}")
        else:
            parts.append(f"{link} without {', '.join(lacks)}")
    if not complete and not parts:
        return ""
    words = complete
    if len(complete) > len(none):
        words = [f"all but {', '.join(none)}" if none else "all"]
    return f"Shared options: {'; '.join([', '.join(words), *parts] if words else parts)}."


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a command and its subcommands with their full names, in the order of the help."""
    yield name, command
    for word, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from commands(child, f"{name} {word}")


def prose_of(command: Any) -> str:
    """The help of a command, with each paragraph on one line."""
    return markdown(flowing(command.help or ""))


def usage(name: str, command: Any) -> str:
    """The usage line of a command, or "" if it takes no arguments."""
    arguments = [
        placeholder(each) + ("..." if each.nargs == -1 else "")
        for each in command.params
        if each.param_type_name == "argument"
    ]
    return f"```text\n{' '.join([name, '[OPTIONS]', *arguments])}\n```" if arguments else ""


def panels(command: Any) -> Panels:
    """The options and arguments of a command, without those that Typer adds, such as --help."""
    groups: Panels = {panel: {} for panel in OWN}
    # A command with subcommands may have no function of its own, and then takes nothing.
    declared = (
        inspect.signature(command.callback, eval_str=True).parameters if command.callback else {}
    )
    for parameter in command.params:
        if parameter.name in declared and not parameter.hidden:
            usual = OWN[parameter.param_type_name == "option"]
            heading = (parameter.rich_help_panel or usual).partition(":")[0]
            panel = groups.setdefault(heading, {})
            panel[parameter.opts[0]] = option_item(parameter, declared[parameter.name])
    return groups


def option_item(parameter: Any, declared: inspect.Parameter) -> str:
    """A list item about an option or an argument."""
    is_argument = parameter.param_type_name == "argument"
    spellings = (
        [[placeholder(parameter)]] if is_argument else [parameter.opts, parameter.secondary_opts]
    )
    names = " / ".join(", ".join(f"`{name}`" for name in each) for each in spellings if each)
    has_value = not (is_argument or parameter.is_flag or parameter.count)
    value = f" {value_in_words(parameter, declared)}" if has_value else ""
    default = default_in_words(parameter, declared)
    description = markdown(parameter.help or "")
    if parameter.envvar:
        description += f" Variable: `{parameter.envvar}`."
    return f"- {names}{value}{f' ({default})' if default else ''}: {description}".removesuffix(": ")


def placeholder(parameter: Any) -> str:
    name: str = parameter.metavar or parameter.name.upper()
    return name


def value_in_words(parameter: Any, declared: inspect.Parameter) -> str:
    """The value that an option takes: its placeholder, or its choices."""
    kind = declared.annotation
    # Unwrap Annotated, lists, and unions with None.
    while typing.get_args(kind) and typing.get_origin(kind) is not Literal:
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    if typing.get_origin(kind) is Literal:
        return f"`{'|'.join(typing.get_args(kind))}`"
    usual = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT"}
    return f"`{parameter.metavar or usual[kind]}`"


def default_in_words(parameter: Any, declared: inspect.Parameter) -> str:
    if isinstance(parameter.show_default, str):
        return markdown(parameter.show_default)
    if parameter.required:
        return "required"
    if not parameter.show_default or declared.default is None or declared.default is False:
        return ""
    return f"`{declared.default}`"


def markdown(text: str) -> str:
    """Escape the characters that are markup in Markdown, except within backticks."""
    parts = text.split("`")
    parts[::2] = (re.sub(r"[\\*_<\[]", r"\\\g<0>", part) for part in parts[::2])
    return "`".join(parts)


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


# --- the events -----------------------------------------------------------------------------


#: The fields of a class in order, each with its description, which is the comment above it.
Fields: TypeAlias = dict[str, str]


def fields_of_classes(source: str) -> dict[str, Fields]:
    """The fields of each class in the source. Those of a base class come first."""
    comments = comments_by_line(source)
    described: dict[str, Fields] = {}
    for record in classes(source):
        fields: Fields = {}
        for base in map(ast.unparse, record.bases):
            fields |= described.get(base, {})
        for name, line in field_lines(record):
            fields[name] = comment_above(comments, line)
            assert fields[name], f"{record.name}.{name} has no comment that describes it"
        described[record.name] = fields
    return described


def named_comments(source: str) -> dict[str, str]:
    """The comments above the constants and type aliases of a module."""
    comments = comments_by_line(source)
    by_name: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if text := comment_above(comments, node.lineno):
                by_name[ast.unparse(target)] = text
    return by_name


def classes(source: str) -> list[ast.ClassDef]:
    return [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


def field_lines(record: ast.ClassDef) -> Iterator[tuple[str, int]]:
    """Yield the name and the line of each field. Class variables are not fields."""
    for statement in record.body:
        if not isinstance(statement, ast.AnnAssign):
            continue
        if not ast.unparse(statement.annotation).startswith("ClassVar"):
            yield ast.unparse(statement.target), statement.lineno


def comments_by_line(source: str) -> dict[int, str]:
    """The text of every `#:` comment, by line."""
    return {
        token.start[0]: token.string.removeprefix("#:").removeprefix(" ")
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.string.startswith("#:")
    }


def comment_above(comments: Mapping[int, str], line: int) -> str:
    """The `#:` comment that ends on the line before `line`, or "" if there is none."""
    first = line
    while first - 1 in comments:
        first -= 1
    return "\n".join(comments[number] for number in range(first, line))


def records_of_events() -> list[Record]:
    """The dataclasses that are parts of events, but not events themselves."""
    source = inspect.getsource(events)
    names = [node.name for node in classes(source) if not node.name.startswith("_")]
    records: list[Record] = [getattr(events, name) for name in names]
    return [record for record in records if record not in events.EVENT_TYPES]


def events_page() -> str:
    source = inspect.getsource(events)
    described = fields_of_classes(source)
    introduction = (
        "`specgen run --json` prints one event per line, as a JSON object. `event` is the name of "
        "the event, `sequence` tells which of several parallel answers it is about (0 for `run`), "
        "and `time_s` is the time since the start of the generation, in seconds. Every field is "
        "always present. [events.schema.json](events.schema.json) is the JSON Schema (2020-12) of "
        "a line. Later versions may add fields: ignore those that you do not know."
    )
    conventions = prose(events).split("\n\n")[-1]
    aliases = [f"### `{name}`\n\n{flowing(text)}" for name, text in named_comments(source).items()]
    reasons = [(f"`{name}`", text) for name, text in REASONS.items()]
    return page(
        "Events",
        "specgen/events.py",
        introduction,
        conventions,
        *(record_section(f"## `{event.event}`", event, described) for event in events.EVENT_TYPES),
        "## Parts of events",
        *(
            record_section(f"### `{record.__name__}`", record, described)
            for record in records_of_events()
        ),
        *aliases,
        "### Reasons\n\nWhy a round drafted as much as it did, or drafted nothing. These are all "
        "reasons; `reason_text` adds the numbers.",
        table(("reason", "meaning"), reasons),
    )


def record_section(heading: str, record: Record, described: Mapping[str, Fields]) -> str:
    """A section about a class, with a table of its fields, without those that all events have."""
    common = described["_Event"] if record in events.EVENT_TYPES else {}
    hints = typing.get_type_hints(record)
    rows = [
        (f"`{name}`", type_in_words(hints[name]), flowing(description).replace("\n", " "))
        for name, description in described[record.__name__].items()
        if name not in common
    ]
    return "\n\n".join([heading, prose(record), table(("field", "type", "meaning"), rows)])


def prose(documented: object) -> str:
    """The docstring of an object, with each paragraph on one line."""
    return flowing(inspect.getdoc(documented) or "")


def flowing(comment: str) -> str:
    """Join the lines of a comment, so that each paragraph and each list item is one line."""
    lines: list[str] = []
    for line in comment.replace("``", "`").splitlines():
        starts_paragraph = not lines or not line.strip() or not lines[-1] or line.startswith("- ")
        if starts_paragraph:
            lines.append(line.strip())
        else:
            lines[-1] += " " + line.strip()
    return "\n".join(lines)


def type_in_words(hint: Any) -> str:
    """The JSON type of a Python type, in words."""
    if dataclasses.is_dataclass(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"  # type: ignore[union-attr]
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return f"array of {type_in_words(arguments[0])}"
    if is_union(hint):
        return " or ".join(type_in_words(argument) for argument in arguments)
    if hint == events.TokenKind:
        return "[TokenKind](#tokenkind)"
    if typing.get_origin(hint) is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    return _JSON_TYPES[hint]


_JSON_TYPES: dict[Any, str] = {
    bool: "boolean",
    float: "number",
    int: "integer",
    str: "string",
    type(None): "null",
    dict[str, Any]: "object",
}


def is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in {typing.Union, types.UnionType}


def events_schema() -> JsonSchema:
    """The JSON Schema of an event."""
    fields = fields_of_classes(inspect.getsource(events))
    definitions = {
        record.__name__: record_schema(record, fields[record.__name__])
        for record in (*events.EVENT_TYPES, *records_of_events())
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "specgen event",
        "description": "One line of `specgen run --json`.",
        "oneOf": [{"$ref": f"#/$defs/{event.__name__}"} for event in events.EVENT_TYPES],
        "$defs": definitions,
    }


def record_schema(record: Record, fields: Fields) -> JsonSchema:
    hints = typing.get_type_hints(record)
    properties: JsonSchema = {}
    if record in events.EVENT_TYPES:
        properties["event"] = {"const": record.event}
    for name, description in fields.items():
        properties[name] = type_schema(hints[name]) | {"description": flowing(description)}
    return {
        "description": prose(record),
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def type_schema(hint: Any) -> JsonSchema:
    if dataclasses.is_dataclass(hint):
        return {"$ref": f"#/$defs/{hint.__name__}"}  # type: ignore[union-attr]
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return {"type": "array", "items": type_schema(arguments[0])}
    if is_union(hint):
        return {"anyOf": [type_schema(argument) for argument in arguments]}
    if typing.get_origin(hint) is Literal:
        return {"enum": list(arguments)}
    return {"type": _JSON_TYPES[hint]}


# --- the exit codes -------------------------------------------------------------------------


def exit_codes_page() -> str:
    comments = named_comments(inspect.getsource(errors))
    rows = [
        ("0", "", "Success."),
        ("1", "", "A bug: an unexpected exception, shown with its traceback. Please report it."),
        *(
            (str(error.exit_code), f"`{error.__name__}`", prose(error).replace("\n\n", " "))
            for error in raised_errors()
        ),
        (str(errors.EXIT_INTERRUPTED), "", flowing(comments["EXIT_INTERRUPTED"])),
        (str(errors.EXIT_BROKEN_PIPE), "", flowing(comments["EXIT_BROKEN_PIPE"])),
    ]
    return page(
        "Exit codes",
        "specgen/errors.py",
        "An error is one line on standard error, often followed by a line that begins with `hint:` "
        "and tells you what to do. In Python it is a subclass of `specgen.errors.SpecgenError`, "
        "with the attributes `message`, `hint` and `exit_code`.",
        table(("code", "class", "when"), rows),
    )


def raised_errors() -> list[type[errors.SpecgenError]]:
    """All errors by exit code, with each parent before its children."""

    def descendants(error: type[errors.SpecgenError]) -> Iterator[type[errors.SpecgenError]]:
        for child in error.__subclasses__():
            if child.__module__ == errors.__name__:
                yield child
                yield from descendants(child)

    return sorted(descendants(errors.SpecgenError), key=lambda error: error.exit_code)


if __name__ == "__main__":
    main()
