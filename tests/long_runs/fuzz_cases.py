"""Commands with randomly changed files, texts and options."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin

import gguf
from typer.core import TyperOption as Option

from specgen.cli.app import command_line
from tests.helpers.conversations import LETTERS
from tests.helpers.sessions import write_models
from tests.helpers.strict_templates import STRICT
from tests.helpers.wrong_files import WRONG_FILES
from tests.long_runs.forked import run_forked
from tests.long_runs.mutated_json import mutated
from tests.tiny import CHATML_TEMPLATE, TinyConfig
from tests.tiny.config import INFILL_TOKENS

PROMPT = "the cat is in the house of the cat"
#: Rows of a batch are rows alone: texts may be compared.
_EXACT = ("-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-n", "24")
_ANY_CODE = frozenset(range(2, 13))


@dataclass(frozen=True)
class Case:
    """A command, and its correct results."""

    arguments: tuple[str, ...]
    stdin: bytes = b""
    #: The exit codes that are right, besides 0.
    codes: frozenset[int] = _ANY_CODE
    #: What standard output must be if the exit code is 0, or a command with the same output.
    text: bytes | None = None
    same_as: tuple[str, ...] | None = None
    limit_s: float = 60.0
    #: Whether several things are asked, each of which may be refused.
    asks_several: bool = False
    #: Variables that differ from those of `variables`; None takes one away.
    environment: Mapping[str, str | None] = field(default_factory=dict)


@dataclass
class Base:
    """What is right, to be changed: tiny models, and the folders of a user who has used specgen."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    text: bytes = b""

    def model(self, name: str) -> Path:
        return self.folder / "models" / f"{name}.gguf"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def drafts(self) -> list[list[str]]:
        """Drafts, with options, that leave files in the folders."""
        return [[str(self.model("f16"))], ["ngram", "--lookup-store"]]

    def run(self, target: Path, draft: Path | str, *more: str) -> tuple[str, ...]:
        """A command that answers the prompt."""
        return ("run", "-m", str(target), "-md", str(draft), *_EXACT, *more, PROMPT)


def variables(home: Path) -> dict[str, str]:
    """The environment of a user with this home."""
    return {
        "SPECGEN_CACHE": str(home / "cache"),
        "SPECGEN_DATA": str(home / "data"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "XDG_CACHE_HOME": str(home / "xdg"),
        "HF_HOME": str(home / "hub"),
        "HF_HUB_OFFLINE": "1",
        "SPECGEN_KERNELS": "llama.cpp",
        "HOME": str(home),
        "NO_COLOR": "1",
    }


def make_base(folder: Path) -> Base:
    """Write the models, and use specgen until there are files in its folders."""
    base = Base(folder)
    (folder / "models").mkdir(parents=True)
    target = TinyConfig(
        logit_scale=6.0,
        chat_template=CHATML_TEMPLATE,
        control_tokens=INFILL_TOKENS,
        unprintable_scale=0.0,
        n_ctx_train=512,
    )
    draft = target.draft(0.05)
    configs = {
        "target": target,
        "draft": draft,
        "f16": replace(draft, tensor_type="f16"),
        "spm": replace(draft, tokenizer="spm", n_vocab=None),
        "gemma": replace(target, architecture="gemma3", sliding_window=64),
        "mamba": replace(target, architecture="mamba"),
    }
    write_models(folder / "models", configs)
    base.environment = variables(base.home)
    base.home.mkdir()
    for draft_and_more in base.drafts:
        command = base.run(base.model("target"), *draft_and_more)
        done = run_forked(command, base.home, base.environment)
        if done.code != 0:
            raise RuntimeError(done.err)
        base.text = done.out
    return base


Maker: TypeAlias = Callable[[Base, Path, random.Random], Case]
MAKERS: dict[str, Maker] = {}


def _kind(make: Maker) -> Maker:
    MAKERS[make.__name__] = make
    return make


def _flipped(data: bytes, chance: random.Random, end: int | None = None) -> bytes:
    """Bytes of which some, before `end`, are others, gone, or there twice."""
    changed = bytearray(data)
    end = min(end or len(data), len(data))
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        place = chance.randrange(max(1, end))
        kind = chance.random()
        if not changed:
            return b"\x00"
        place = min(place, len(changed) - 1)
        if kind < 0.7:
            changed[place] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        elif kind < 0.85:
            del changed[place : place + chance.randrange(1, 9)]
        else:
            changed[place:place] = changed[place : place + chance.randrange(1, 9)]
    return bytes(changed)


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


_ODD_TEXTS = (
    *("", " ", "\x00", "\n\n", "é", "\U0001f600" * 3, "\ufffd", "\u202e", "0x10", "nan"),
    *("<|im_end|>", "<|im_start|>user", "a" * 5000, "-" * 60_000, "-", "--"),
)
#: The first ones are what options may well have.
_ODD_NUMBERS = (
    *("0", "-1", "1", "2", "7", "1e9", "nan", "inf", "-inf", "1.5", str(2**31), str(2**64)),
)


def _changed_text(text: str, chance: random.Random) -> str:
    """A text of which words or signs are others, gone, or there twice."""
    parts = re.findall(r"\w+|\s+|.", text, re.DOTALL)
    for _ in range(chance.choice([1, 1, 2, 4])):
        place = chance.randrange(len(parts) or 1)
        kind = chance.random()
        if kind < 0.3:
            parts[place : place + 1] = [chance.choice(_ODD_TEXTS)]
        elif kind < 0.6:
            del parts[place : place + chance.choice([1, 1, 5])]
        elif kind < 0.8:
            parts[place:place] = parts[place : place + chance.choice([1, 3])]
        elif parts:
            other = chance.randrange(len(parts))
            place = min(place, len(parts) - 1)
            parts[place], parts[other] = parts[other], parts[place]
    return "".join(parts)


@functools.cache
def _reader(path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(path)


_ODD_BYTES = (
    *(struct.pack("<Q", number) for number in (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)),
    *(
        struct.pack("<ff", *pair)
        for pair in ((math.nan, math.nan), (math.inf, -1.0), (-1.0, 0.0), (1e38, 1e-38))
    ),
)


def _changed_model(path: Path, chance: random.Random) -> bytes:
    """A model's file with a mistake somewhere."""
    data, reader = path.read_bytes(), _reader(path)
    kind = chance.random()
    if kind < 0.1:
        return _cut(data, chance)
    if kind < 0.35:
        return _flipped(data, chance, int(reader.data_offset))
    if kind < 0.45:
        return _flipped(data, chance)
    changed = bytearray(data)
    fields = [*reader.fields.values()]
    named = [*fields, *(tensor.field for tensor in reader.tensors)]
    some = chance.choice(fields if kind < 0.85 else named)
    # A field is its key, its type and its values, each a number, or a length and a text.
    offset = some.offset
    for part in some.parts:
        size = part.nbytes
        is_value = part is not some.parts[0]
        if size and is_value and chance.random() < 0.5:
            odd = (chance.choice(_ODD_BYTES) * (size // 8 + 1))[:size]
            changed[offset : offset + size] = odd
            break
        offset += size
    return bytes(changed)


def _damaged(base: Base, folder: Path, chance: random.Random, *names: str) -> Path:
    """A copy of one of the base's models with a mistake somewhere."""
    path = folder / "damaged.gguf"
    path.write_bytes(_changed_model(base.model(chance.choice(names)), chance))
    return path


@_kind
def target_file(base: Base, folder: Path, chance: random.Random) -> Case:
    """A damaged target: it is rejected, or its text is the same with a draft as without."""
    damaged = _damaged(base, folder, chance, "target", "target", "gemma", "mamba", "spm")
    draft = chance.choice(["ngram", str(base.model("draft"))])
    return Case(base.run(damaged, draft), same_as=base.run(damaged, "none"))


@_kind
def draft_file(base: Base, folder: Path, chance: random.Random) -> Case:
    """A damaged draft: it is rejected, or the text is the target's."""
    damaged = _damaged(base, folder, chance, "draft", "spm", "f16")
    return Case(base.run(base.model("target"), damaged), text=base.text)


@_kind
def learnt(base: Base, folder: Path, chance: random.Random) -> Case:
    """What was learnt on this machine is nonsense: the text is the same."""
    shutil.copytree(base.home, folder, dirs_exist_ok=True)
    for file in (folder / "cache").glob("*.json"):
        data = file.read_bytes()
        file.write_bytes(
            mutated(json.loads(data), chance) if chance.random() < 0.8 else _cut(data, chance)
        )
    draft = chance.choice(["ngram", str(base.model("f16"))])
    return Case(base.run(base.model("target"), draft), text=base.text, codes=frozenset())


@_kind
def cached(base: Base, folder: Path, chance: random.Random) -> Case:
    """A copy of a draft or a store of texts is damaged: the text is the same."""
    shutil.copytree(base.home, folder, dirs_exist_ok=True)
    kept = [path for path in folder.rglob("*") if path.is_file()]
    file = chance.choice(kept)
    data = file.read_bytes()
    file.write_bytes(_flipped(data, chance) if chance.random() < 0.7 else _cut(data, chance))
    return Case(base.run(base.model("target"), *chance.choice(base.drafts)), text=base.text)


@_kind
def prompt(base: Base, folder: Path, chance: random.Random) -> Case:
    """Prompts that nobody types."""
    text = _changed_text(PROMPT, chance).encode("utf-8", "surrogatepass")
    if chance.random() < 0.3:
        text = _flipped(text, chance)
    more = [chance.choice(["--chat", "--raw"])]
    if chance.random() < 0.3:
        more += ["--system", chance.choice(_ODD_TEXTS).replace("\x00", "")]
    if chance.random() < 0.3:
        (folder / "prompt.txt").write_bytes(text)
        own, stdin = ["-f", "prompt.txt"], b""
    else:
        own, stdin = ["-"], text
    fast, plain = (
        (*base.run(base.model("target"), draft)[:-1], *more, *own)
        for draft in (base.model("draft"), "none")
    )
    return Case(fast, stdin=stdin, same_as=plain)


@_kind
def model_kind(base: Base, folder: Path, chance: random.Random) -> Case:
    """A file that is not a model, as target or draft: it is rejected, damaged or not."""
    other = folder / "other.gguf"
    WRONG_FILES[chance.choice([*WRONG_FILES])].write(other)
    command = base.run(base.model("target"), other)
    if chance.random() < 0.5:
        command = base.run(other, base.model("draft"))
    if chance.random() < 0.5:
        # An answer would be a finding.
        return Case(command, codes=frozenset({4}), text=b"refused")
    data = other.read_bytes()
    other.write_bytes(_flipped(data, chance) if chance.random() < 0.7 else _cut(data, chance))
    return Case(command)


#: Encodings of text files, with and without a byte order mark.
_CODECS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1")
_TEXTS = (PROMPT, "le café est dans la maison\r\nthe cat\r\n", "猫在房子里。\n猫在 the house\n")


@_kind
def text_kind(base: Base, folder: Path, chance: random.Random) -> Case:
    """A text file in any encoding is read like the same text in UTF-8, or rejected."""
    option = chance.choice(["-f", "--grammar-file", "--lookup-file"])
    text = chance.choice(_TEXTS)
    if option == "--grammar-file":
        text = f"root ::= {json.dumps(text, ensure_ascii=False)}"
    data = text.encode(chance.choice(_CODECS), "replace")
    is_changed = chance.random() < 0.4
    if is_changed:
        data = _flipped(data, chance) if chance.random() < 0.7 else _cut(data, chance)
    (folder / "odd.txt").write_bytes(data)
    (folder / "plain.txt").write_bytes(text.encode())
    target = base.model("target")
    if option == "--lookup-file":
        return Case(base.run(target, "ngram", option, "odd.txt"), text=base.text)
    more = [] if option == "-f" else [PROMPT]
    odd, plain = (
        (*base.run(target, "ngram")[:-1], option, name, *more) for name in ("odd.txt", "plain.txt")
    )
    # What latin-1 cannot write is another text.
    says_the_same = not is_changed and b"?" not in data
    return Case(odd, same_as=plain if says_the_same else None)


#: Commands whose options are tried: how often, what they need at least, and their arguments.
_COMMANDS: Mapping[str, tuple[int, str, tuple[str, ...]]] = {
    "run": (8, "-n 12", (PROMPT,)),
    "chat": (2, "-n 12", ()),
    "fim": (3, "-n 12", ("file.py:1",)),
    "batch": (3, "-n 12", ("in.jsonl", "out.jsonl")),
    "verify": (1, "-n 8 --prompts prompts.jsonl", ()),
    "tune": (1, "", ()),
    "bench": (1, "-n 8 --prompts prompts.jsonl --count 1", ()),
    "race": (1, "-n 12", (PROMPT,)),
}
_FILES = {
    "file.py": "def f(x):\n    return x\n",
    "in.jsonl": '{"prompt": "a"}\nthe cat\n',
    "prompts.jsonl": '{"prompt": "the cat"}\n',
}
#: Options that fetch, wait, or start other programs.
_LEFT_OUT = {"--help", "--against", "--install-completion", "--show-completion"}


@functools.cache
def _options(command: str) -> list[Option]:
    found = [each for each in command_line().commands[command].params if isinstance(each, Option)]
    return [option for option in found if not _LEFT_OUT & set(option.opts)]


def _value(option: Option, chance: random.Random) -> list[str]:
    """A value for an option: of its kind mostly, and mostly one that it can have."""
    kind: Any = option.type_descriptor.annotation
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    if kind is bool or option.count:
        return []
    if get_origin(kind) is Literal and chance.random() < 0.8:
        return [str(chance.choice(get_args(kind)))]
    if kind is Path:
        names = ["file.py", "in.jsonl", "missing", ".", "/dev/null", "prompts.jsonl"]
        return [chance.choice(names)]
    if kind in (int, float):
        return [chance.choice(_ODD_NUMBERS[:6] if chance.random() < 0.7 else _ODD_NUMBERS)]
    texts = [*_ODD_NUMBERS, "auto", "off", "3,2,1", "ngram", "none", "file.py", "out.html", "0.5"]
    odd = [text for text in _ODD_TEXTS if "\x00" not in text]
    return [chance.choice(texts if chance.random() < 0.7 else odd)]


@_kind
def options(base: Base, folder: Path, chance: random.Random) -> Case:
    """Options that do not go together, with values that they cannot have."""
    for name, text in _FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    command = chance.choices([*_COMMANDS], [weight for weight, *_ in _COMMANDS.values()])[0]
    _, needed, own = _COMMANDS[command]
    draft = chance.choice(["ngram", "none", str(base.model("draft")), str(base.model("spm"))])
    arguments = [command, "-m", str(base.model("target")), "-md", draft, *needed.split(), "-t", "1"]
    for _ in range(chance.choice([1, 2, 2, 3, 5])):
        option = chance.choice(_options(command))
        name = chance.choice([*option.opts, *option.secondary_opts])
        arguments += [name, *_value(option, chance)]
    arguments += own
    stdin = b"the cat\nand the dog\n"
    return Case(tuple(arguments), stdin=stdin, limit_s=150.0, asks_several=command == "chat")


#: Variables that name folders, or decide about them.
_FOLDER_VARIABLES = (
    *("HOME", "SPECGEN_CACHE", "SPECGEN_CONFIG", "SPECGEN_DATA", "HF_HOME", "HF_HUB_CACHE"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "TMPDIR"),
)
#: The folder of a case that nobody but root may enter.
CLOSED = "closed"
#: Folders that cannot be used, most of them not even by root.
_ODD_FOLDERS = (
    *("file", "/dev/null", "/dev/full", "/proc", "/sys", "missing/folder", "a/" * 200, "a" * 300),
    *("~nobody-has-this-name/x", "~", "\udcff", "\u202e", "-", "loop/x", f"{CLOSED}/x", CLOSED),
)
#: Other variables, with values that they should not have.
_ODD_VALUES: Mapping[str, tuple[str, ...]] = {
    "TERM": ("", "dumb", "no-such-terminal", "\udcff"),
    "COLUMNS": ("0", "-1", "many", "1", "1000000", "\u00b2"),
    "LINES": ("0", "-1"),
    "LANG": ("C", "xx_YY", ""),
    "LC_ALL": ("C", "xx_YY.ISO-8859-1", ""),
    "TZ": ("Nowhere/City", "\udcff", ":"),
    "FORCE_COLOR": ("1", "", "no"),
    "OMP_NUM_THREADS": ("many", "0", "-1"),
    "HF_ENDPOINT": ("nonsense", "", "http://[::1"),
    "HTTPS_PROXY": ("nonsense", "http://"),
    "SSL_CERT_FILE": ("missing",),
    "HF_HUB_ETAG_TIMEOUT": ("soon",),
    "SPECGEN_POLICY": ("nonsense", "", "cost"),
    "SPECGEN_LEARN": ("perhaps", "1"),
    "SPECGEN_NONSENSE": ("1",),
}
#: Variables with which a command may be refused: they are options, or huggingface_hub's.
_REFUSED_VARIABLES = {"SPECGEN_POLICY", "SPECGEN_LEARN", "HF_HUB_ETAG_TIMEOUT"}


@_kind
def environments(base: Base, folder: Path, chance: random.Random) -> Case:
    """Variables are missing, name folders that cannot be used, or are odd: answers are the same."""
    (folder / "file").touch()
    (folder / "loop").symlink_to("loop")
    (folder / CLOSED).mkdir(mode=0)
    changed: dict[str, str | None] = {}
    for name in chance.sample(_FOLDER_VARIABLES, chance.choice([1, 1, 2, 4, 10])):
        changed[name] = chance.choice([None, *_ODD_FOLDERS])
    for name in chance.sample([*_ODD_VALUES], chance.choice([0, 0, 1, 3])):
        changed[name] = chance.choice(_ODD_VALUES[name])
    codes = frozenset({2} if _REFUSED_VARIABLES & changed.keys() else ())
    command = chance.choice(["run", "run", "run", "chat", "batch", "list", "config", "forget"])
    model = ("-m", str(base.model("target")), "-md", "ngram", *_EXACT)
    if command == "run":
        draft = chance.choice(["ngram", "none", str(base.model("f16"))])
        arguments = base.run(base.model("target"), draft)
        return Case(arguments, codes=codes, text=base.text, environment=changed)
    if command == "chat":
        return Case(("chat", *model), stdin=b"the cat\n", codes=codes, environment=changed)
    (folder / "in.jsonl").write_text(_FILES["in.jsonl"], encoding="utf-8")
    arguments = {
        "batch": ("batch", *model, "in.jsonl", "out.jsonl"),
        "list": ("models", "list"),
        "config": ("config",),
        "forget": ("draft", "forget"),
    }[command]
    return Case(arguments, codes=codes, environment=changed)


def _odd_conversation(chance: random.Random) -> list[dict[str, Any]]:
    """Messages of an API in an order that nobody plans, with texts that nobody types."""
    messages: list[dict[str, Any]] = []
    ids = [""]
    for letter in chance.choices(LETTERS, k=chance.randint(1, 7)):
        text = chance.choice([PROMPT, PROMPT, *_ODD_TEXTS[:12]])
        match letter:
            case "S" | "U" | "A":
                role = {"S": "system", "U": "user", "A": "assistant"}[letter]
                messages.append({"role": role, "content": text})
            case "E":
                messages.append(
                    {"role": "assistant", "content": chance.choice([None, "", " \n", []])}
                )
            case "C":
                ids = [f"id{len(messages)}.{n}" for n in range(chance.choice([1, 1, 2, 3]))]
                look = {"name": "look", "arguments": chance.choice(['{"a": 1}', "{}", ""])}
                message = {
                    "role": "assistant",
                    "content": chance.choice([None, "", text]),
                    "tool_calls": [
                        {"id": each, "type": "function", "function": look} for each in ids
                    ],
                    "reasoning_content": chance.choice([None, "why"]),
                }
                messages.append(message)
            case "T":
                answered = chance.choice(ids)
                messages.append({"role": "tool", "tool_call_id": answered, "content": text})
    return messages


@_kind
def shapes(base: Base, folder: Path, chance: random.Random) -> Case:
    """Conversations that were interrupted, for templates that refuse them: all are answered."""
    (folder / "strict.jinja").write_text(chance.choice([*STRICT.values()]), encoding="utf-8")
    lines = [json.dumps({"messages": _odd_conversation(chance)}) for _ in range(8)]
    stdin = "".join(f"{line}\n" for line in lines).encode()
    draft = chance.choice(["ngram", str(base.model("draft"))])
    arguments = (
        # Seven messages with three calls each have more tokens than the 512 of training.
        *("batch", "-m", str(base.model("target")), "-md", draft, *_EXACT, "-c", "4096"),
        *("--chat-template", "strict.jinja", "-", "-"),
    )
    return Case(arguments, stdin=stdin, codes=frozenset())


def make_case(
    number: int, seed: int, base: Base, folder: Path, kinds: Iterable[str]
) -> tuple[str, Case]:
    """Case `number` of a seed, in a new folder. It is always the same."""
    chance = random.Random(f"{seed}/{number}")
    names = [*kinds]
    name = names[number % len(names)]
    return name, MAKERS[name](base, folder, chance)


def repeated(kinds: Iterable[str]) -> list[str]:
    """The kinds, of which models and options are tried more often than others."""
    times = {"target_file": 3, "draft_file": 2, "options": 4}
    return [*itertools.chain.from_iterable([kind] * times.get(kind, 1) for kind in kinds)]
