"""Text files of users: UTF-8 and UTF-16 are supported, anything else is a clear error."""

from __future__ import annotations

import codecs
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.cli.chat import piped_messages
from specgen.cli.flags import text_in
from specgen.cli.inputs import read_input, read_template
from specgen.errors import PromptError, SpecgenError, UsageError
from specgen.measure.prompts import read_prompts
from specgen.system.files import decode_lines, decode_text, encoding_of, read_toml

#: Texts as people have them; the last ones have few or no ASCII letters.
TEXTS = (
    "the cat",
    "x\r\n",
    "Zwölf Boxkämpfer jagen Viktor\r\nüber den großen Sylter Deich\r\n",
    '{"prompt": "a", "n": [1, 2]}\n',
    "Съешь ещё этих мягких французских булок\n",
    "床前明月光,\n疑是地上霜。\n举头望明月,\n低头思故乡。\n",
    "いろはにほへと ちりぬるを\n",
    "├── a\n│   └── b\n════════\n",
    "\N{GRINNING FACE} smile \N{CAT FACE}\n",
)
#: Byte order marks by encoding; an empty one is a file without a mark.
MARKS = {
    "utf-8": (b"", codecs.BOM_UTF8),
    "utf-16-le": (b"", codecs.BOM_UTF16_LE),
    "utf-16-be": (b"", codecs.BOM_UTF16_BE),
    "utf-32-le": (codecs.BOM_UTF32_LE,),
    "utf-32-be": (codecs.BOM_UTF32_BE,),
}
ENCODED = [(codec, mark) for codec, marks in MARKS.items() for mark in marks]


def decoded(data: bytes) -> str:
    return decode_text(data, "a.txt", PromptError)


def complaint(data: bytes) -> str:
    with pytest.raises(PromptError) as caught:
        decoded(data)
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("codec", "mark"), ENCODED)
def test_a_text_is_read_in_any_unicode_encoding(text: str, codec: str, mark: bytes) -> None:
    data = mark + text.encode(codec)
    assert decoded(data) == text
    assert encoding_of(data).encode(text) == data
    # A pipe delivers lines; a line of UTF-16 ends within a line break.
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    assert list(decode_lines(io.BytesIO(data), "a.txt", PromptError)) == lines


@given(st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1))
def test_ascii_is_never_taken_for_another_encoding(text: str) -> None:
    assert decoded(text.encode()) == text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"caf\xe9", "a.txt is not UTF-8: byte 0xe9 on line 1"),
        (b"one\ntwo\ncaf\xe9 three", "a.txt is not UTF-8: byte 0xe9 on line 3"),
        (codecs.BOM_UTF16_LE + "one\ntwo".encode("utf-16-le") + b"\0\xd8", "not UTF-16: byte 0x00"),
        (codecs.BOM_UTF16_LE + "one\ntwo".encode("utf-16-le") + b"x", "on line 2"),
        (b"one\ntwo\0three\n", "a.txt is not text: it has a NUL byte on line 2"),
        (b"one\0", "NUL byte on line 1"),
        (b"a\0b", "NUL byte on line 1"),
        (b"12 34 56 78 9\0", "NUL byte on line 1"),
        ("a café\nand a naïve\0 one.".encode("latin-1"), "NUL byte on line 2"),
        # `find -print0`
        (b"src/a.py\0src/bc.py\0", "NUL byte on line 1"),
        (codecs.BOM_UTF16_LE + "one\n\0two".encode("utf-16-le"), "NUL byte on line 2"),
        (b"GGUF\3\0\0\0\1\0\0\0\0\0\0\0", "NUL byte on line 1"),
        (b"PK\3\4\x14\0\0\0\x08\0", "NUL byte on line 1"),
        (bytes(1000), "NUL byte on line 1"),
        (b"", ""),
    ],
)
def test_what_is_no_text_is_an_error_with_its_line(data: bytes, said: str) -> None:
    if said:
        assert said in complaint(data)
    else:
        assert decoded(data) == ""


@given(st.binary(max_size=200))
def test_bytes_are_a_text_without_nuls_or_an_error(data: bytes) -> None:
    """For any bytes: no NUL passes, and text that passes is the content of the file."""
    try:
        text = decoded(data)
    except SpecgenError:
        return
    assert "\0" not in text
    assert encoding_of(data).encode(text) == data


# --- all readers of text files


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le"])
def test_powershells_files_are_read_wherever_a_text_is(tmp_path: Path, codec: str) -> None:
    def file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_bytes(text.replace("\n", "\r\n").encode(codec))
        return path

    assert read_input(file("prompt.txt", "the cat\n")) == "the cat\r\n"
    assert text_in(file("a.gbnf", 'root ::= "é"'), "--grammar-file") == 'root ::= "é"'
    assert read_toml(file("config.toml", '[run]\nseed = 3\ntext = "é"\n')) == {
        "run": {"seed": 3, "text": "é"}
    }
    assert read_prompts(file("prompts.txt", "one\ntwo\n")) == ["one", "two"]
    assert read_prompts(file("prompts.jsonl", '{"prompt": "é"}\n{"prompt": "b"}\n')) == ["é", "b"]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert read_template(str(file("chat.jinja", template))) == template
    raw_lines = io.BytesIO("Why?\r\nÉ, so\\\r\nwhat?\r\n".encode(codec))
    assert list(piped_messages(raw_lines)) == ["Why?", "É, so\nwhat?"]


def test_a_binary_file_is_refused_wherever_a_text_is(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(PromptError, match="is not text"):
        read_input(path)
    with pytest.raises(UsageError, match="--grammar-file .*is not text"):
        text_in(path, "--grammar-file")
    with pytest.raises(UsageError, match="is not text"):
        read_toml(path)
    with pytest.raises(PromptError, match="is not text"):
        read_prompts(path)
    with pytest.raises(PromptError, match="standard input is not text: it has a NUL byte on line"):
        list(piped_messages([b"one\n", b"t\0wo\n"]))
