"""The commands that a user can give among the messages of a conversation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from specgen.errors import UsageError

#: A word after a slash, alone or before a space; so paths and comments of C are no commands.
_COMMAND = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the user."""

    name: str
    #: The text after the name; may be empty.
    argument: str = ""


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """The arguments and the effect of a command."""

    usage: str
    does: str
    takes: Literal["nothing", "something", "anything", "on or off"] = "nothing"

    @property
    def name(self) -> str:
        return self.usage.split(" ")[0].removeprefix("/")


COMMANDS: tuple[CommandHelp, ...] = (
    CommandHelp("/help", "show the commands (also /?)"),
    CommandHelp("/regen", "answer the last question again"),
    CommandHelp("/undo", "remove the last question and its answer"),
    CommandHelp("/reset", "remove all turns; the system message and files stay (also /clear)"),
    CommandHelp(
        "/system TEXT", "change the system message; without TEXT there is none", "anything"
    ),
    CommandHelp("/save FILE", "write the conversation to a file", "something"),
    CommandHelp("/load FILE", "go on with the conversation in a file", "something"),
    CommandHelp("/draft on|off", "let later answers be drafted for, or not", "on or off"),
    CommandHelp("/think", "show what the model thought before its last answer"),
    CommandHelp("/stats", "show figures of the last answer and the conversation"),
    CommandHelp("/quit", "end the conversation (also /bye, /exit)"),
)
#: Names that other programs have for these commands.
ALIASES = {"?": "help", "clear": "reset", "bye": "quit", "exit": "quit"}
_BY_NAME = {command.name: command for command in COMMANDS}


def parse(line: str) -> Command | None:
    """Return the command in a line; None if the line is a message. Raise `UsageError` if there is no such
    command, or its argument is wrong."""
    found = _COMMAND.fullmatch(line.rstrip())
    if found is None:
        return None
    name, argument = found[1].lower(), (found[2] or "").strip()
    name = ALIASES.get(name, name)
    command = _BY_NAME.get(name)
    if command is None:
        raise UsageError(
            f"there is no command /{name}",
            hint="/help lists the commands; to send this as a message, put a space before the slash",
        )
    is_wrong = {
        "nothing": bool(argument),
        "something": not argument,
        "anything": False,
        "on or off": argument not in ("on", "off"),
    }[command.takes]
    if is_wrong:
        raise UsageError(f"{line.strip()!r}: usage: {command.usage}")
    return Command(name, argument)
