"""The grammars of tool calls and JSON in complete answers: the model would prefer another text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import specgen
from tests.helpers.cli import in_process
from tests.helpers.scripted import asked_of, write_model_that_says
from tests.helpers.server import running, session_of
from tests.helpers.templates import CONTROLS, FAMILIES, calls_as_written

PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
    "required": ["path"],
}


def tool(name: str, parameters: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("read", PARAMETERS), tool("read_all", PARAMETERS), tool("list", {})]
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "look"}], "tools": TOOLS}
#: Its thoughts and answers are messages with a channel.
HARMONY = (
    "{%- for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{#- tools functions. <|channel|>analysis<|message|> #}<|start|>assistant"
)
READS = (("read", "C"), ("read", "F"))
THINKS = "{#- <think> #}"
OPENS = "<think>\n"


@dataclass(frozen=True)
class Family:
    """A template, and its control tokens."""

    template: str
    controls: tuple[str, ...] = ()

    def call(self, name: str = "NAME", lines: object = "x") -> str:
        """A call as the family's models write it, by default with an argument of a wrong type."""
        arguments = {"path": "a.py", "lines": lines}
        if self.template is HARMONY:
            head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            return f"{head}{json.dumps(arguments)}<|call|>"
        return calls_as_written(self.template, (name, arguments))


FAMILY = {
    **{name: Family(FAMILIES[name], CONTROLS.get(name, ())) for name in FAMILIES},
    "Hermes in plain text": Family(FAMILIES["Hermes"]),
    "gpt-oss": Family(
        HARMONY,
        (
            *("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
            *("<|call|>", "<|return|>", "<|constrain|>"),
        ),
    ),
}


def message_of(answer: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """The content, the thoughts, and the calls of an answer."""
    message = answer["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return (
        message["content"] or "",
        message.get("reasoning_content") or "",
        [(call["name"], json.loads(call["arguments"])) for call in calls],
    )


def is_right(name: str, arguments: dict[str, Any]) -> bool:
    if name == "list":
        return arguments == {}
    is_whole = {"path"} <= arguments.keys() <= {"path", "lines"}
    return is_whole and name in ("read", "read_all") and isinstance(arguments.get("lines", 0), int)


def said_by(
    folder: Path, name: str, text: str, added: str = "", draft: str = "ngram", **body: Any
) -> tuple[str, str, list[tuple[str, Any]]]:
    """The content, thoughts and calls of a text. `added` is appended to the family's template."""
    family = FAMILY[name]
    text = text.replace("@call", family.call())
    body = {**ASKED, **body}
    answer = asked_of(
        folder, family.template + added, text, body, controls=family.controls, draft=draft
    )
    assert "choices" in answer, answer
    return message_of(answer)


@pytest.mark.parametrize("name", FAMILY)
def test_an_invented_name_is_impossible(tmp_path: Path, name: str) -> None:
    """With any draft, including one that prefers it, and after text if the family allows that."""
    before = "" if name in ("Llama", "gpt-oss") else "In a < b I look. "
    # gpt-oss may write its channel after a name: what follows must be where the model expects it.
    text = before + FAMILY[name].call("rear" if name == "gpt-oss" else "reread")
    drawn: dict[str, Any] = {
        "temperature": 1.5,
        "seed": 3,
        "speculative": {"verifier": "match"},
        "max_tokens": 150,
    }
    for sampling, drafts in (({}, ("ngram", "same")), (drawn, ("same",))):
        plain = said_by(tmp_path, name, text, draft="none", **sampling)
        content, _, calls = plain
        # Where this model has no wish, it takes LFM's single quote, and never ends the text.
        assert calls or sampling or name == "LFM"
        assert all(is_right(*call) for call in calls)
        assert content.startswith(before.strip())
        for draft in drafts:
            assert said_by(tmp_path, name, text, draft=draft, **sampling) == plain


@pytest.mark.parametrize("name", ["Hermes in plain text", "Qwen-Coder", "DeepSeek", "Llama"])
def test_text_without_a_mark_is_free(tmp_path: Path, name: str) -> None:
    text = 'So {"name": "x"} < <tool <tool_cal <tool_cabll> <cal <call> [TOOL_CALL] é'
    assert said_by(tmp_path, name, text) == (text, "", [])


def test_several_calls_followed_by_text(tmp_path: Path) -> None:
    calls = [FAMILY["Hermes"].call(name, 7) for name in ("read", "read_all")]
    calls.append('<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>')
    text = f"One {calls[0]} two {calls[1]}\n{calls[2]} three"
    arguments = {"path": "a.py", "lines": 7}
    for name in ("Hermes", "Hermes in plain text"):
        content, _, found = said_by(tmp_path, name, text)
        assert content.split() == ["One", "two", "three"]
        assert found == [("read", arguments), ("read_all", arguments), ("list", {})]


@pytest.mark.parametrize("added", [THINKS, OPENS])
def test_a_call_in_a_thought_is_not_a_call(tmp_path: Path, added: str) -> None:
    begin = "<think>" if added == THINKS else ""
    thought = f"I may say {FAMILY['Hermes'].call()} or not."
    content, thoughts, calls = said_by(
        tmp_path, "Hermes", f"{begin}{thought}</think>\n\nSo: @call", added
    )
    assert content.startswith("So:")
    assert thoughts == thought
    ((name, arguments),) = calls
    assert is_right(name, arguments)


#: Thoughts in front of a text, and what a template has of them.
THOUGHTS = {
    "may come": ("Hermes", THINKS, "<think>No < yes.</think>\n\n"),
    "opened": ("Hermes in plain text", OPENS, "No < yes.</think>\n\n"),
    "closed": ("DeepSeek", "<think>\n\n</think>\n\n", ""),
    "gpt-oss": (
        "gpt-oss",
        "",
        (
            "<|channel|>analysis<|message|>No < yes.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>"
        ),
    ),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_required_calls_and_schemas_are_enforced_after_thoughts(tmp_path: Path, name: str) -> None:
    family, added, thought = THOUGHTS[name]
    unit = {"properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object", **unit}}}
    tools = [tool("read", unit), tool("read_all", {})]
    for said in ("Just text.", "@call"):
        for draft in ("none", "same"):
            content, thoughts, calls = said_by(
                tmp_path, family, thought + said, added, draft, tool_choice="required", tools=tools
            )
            assert (content, thoughts) == ("", "No < yes." if thought else "")
            assert calls
            for called, arguments in calls:
                assert (called, arguments.get("unit")) in (*READS, ("read_all", None))
        content, thoughts, calls = said_by(
            tmp_path, family, thought + said, added, response_format=schema, tools=[]
        )
        assert (thoughts, calls) == ("No < yes." if thought else "", [])
        assert ("read", json.loads(content)["unit"]) in READS


@pytest.mark.parametrize("name", THOUGHTS)
def test_run_prints_json_without_thoughts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """So does Python's interface."""
    family, added, thought = THOUGHTS[name]
    template, schema = FAMILY[family].template + added, json.dumps({"enum": ["yes", "no"]})
    body = {"messages": ASKED["messages"]}
    target = write_model_that_says(
        tmp_path / "m.gguf", template, thought + "no", body, FAMILY[family].controls
    )
    run = in_process(capsys)
    for rule in (["-j", schema], ["--grammar", 'root ::= "\\"no\\"" | "\\"yes\\""']):
        for draft in ("none", "ngram", tmp_path / "draft.gguf"):
            result = run("run", "-m", target, "-md", draft, "--temp", "0", "-q", *rule, "look")
            assert result.out in ('"yes"', '"no"'), result
    with specgen.load(target, "none") as model:
        answer = model.generate("look", json_schema=schema)
        assert answer.text in ('"yes"', '"no"')
        assert answer.finished is not None
        assert ("No < yes." in answer.finished.text) == bool(thought)


def test_a_model_that_thinks_may_answer_at_once(tmp_path: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": PARAMETERS}}
    text = '{"path": "<think> </think>"}'
    found = said_by(tmp_path, "Hermes", text, THINKS, response_format=schema, tools=[])
    assert found == (text, "", [])


def test_strings_may_escape_any_character(tmp_path: Path) -> None:
    """The grammar allowed only control characters, and made a wrong text of "K\\u00f6ln"."""
    path = json.dumps("Köln ’ 😀 \x1e")
    schema = {"type": "json_schema", "json_schema": {"schema": PARAMETERS}}
    text = f'{{"path": {path}}}'
    found = said_by(tmp_path, "Hermes", text, response_format=schema, tools=[])
    assert found == (text, "", [])
    call = FAMILY["Hermes"].call("read", 7).replace('"a.py"', path)
    found = said_by(tmp_path, "Hermes", call)
    assert found == ("", "", [("read", {"path": json.loads(path), "lines": 7})])


@pytest.mark.parametrize("name", FAMILY)
def test_a_required_answer_ends_after_its_first_call(tmp_path: Path, name: str) -> None:
    text = FAMILY[name].call("read", 7)
    for choice in ("required", {"type": "function", "function": {"name": "read"}}):
        found = said_by(tmp_path, name, text, tool_choice=choice)
        assert found == ("", "", [("read", {"path": "a.py", "lines": 7})])


FENCED = '```json\n{\n  "name": "read",\n  "arguments": {"path": "a.py"}\n}\n```'


#: Calls at the beginning of an answer, whose last argument is not an integer.
BARE = [
    FENCED.replace('"a.py"', '"a.py", "lines": "x"'),
    '{"name": "read", "arguments": {"path": "a.py", "lines": "x"}}',
    '{{"name": "read", "arguments": {"path": "a.py", "lines": "x"}}}',
    '<tools>\n{"name": "read", "arguments": {"path": "a.py", "lines": "x"}}\n</tools>',
    ' {"name":"read","parameters":{"path": "a.py", "lines": "x"}} Done.',
    (
        '{"name": "list", "arguments": {}}\n'
        '{"name": "read", "arguments": {"path": "a.py", "lines": "x"}}'
    ),
]


@pytest.mark.parametrize("text", BARE)
@pytest.mark.parametrize("added", ["", OPENS])
def test_a_call_without_a_mark_has_valid_arguments(tmp_path: Path, text: str, added: str) -> None:
    """Where it is the beginning of an answer, or follows one that is, and its name was offered."""
    lead = "Well.</think>" if added else ""
    for draft in ("none", "same"):
        _, _, calls = said_by(tmp_path, "Hermes in plain text", lead + text, added, draft)
        *others, (name, arguments) = calls
        assert len(others) == text.count('"list"')
        assert (name, arguments["path"]) == ("read", "a.py")
        assert is_right(name, arguments)


@pytest.mark.parametrize("text", ['{"name": "Ann", "age": "x"}', "```json\n[1]\n```", "```\n{"])
def test_other_objects_are_free(tmp_path: Path, text: str) -> None:
    assert said_by(tmp_path, "Hermes in plain text", text) == (text, "", [])


EDIT = {
    "properties": {
        "path": {"type": "string"},
        "all": {"type": "boolean"},
        "old": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "lines": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["path", "old"],
}
EDITS = {
    "LFM": "<|tool_call_start|>[edit(all=True, old='it\\'s', lines=[1, 2], "
    "path='a.py')]<|tool_call_end|>",
    "Qwen-Coder": "<tool_call>\n<function=edit>\n<parameter=old>\nit's\n</parameter>\n"
    "<parameter=all>\ntrue\n"
    "</parameter>\n<parameter=path>a.py</parameter><parameter=lines>\n[1, "
    "2]</parameter>\n</function>\n</tool_call>",
    "Gemma": '<|call>call:edit{all:true,lines:[1,2],old:<|"|>a < b><|"|>,path:<|"|>a.py<|"|>}'
    "<call|>",
}


@pytest.mark.parametrize(
    ("template", "text", "controls"),
    [
        # The marks after a call begin alike, and more than four tokens of text spell that
        # beginning.
        (
            FAMILIES["Kimi"]
            .replace("<|/one|>", "<|tool_call_end|>")
            .replace("<|one|>", "<|tool_call_begin|>"),
            (
                '<|section|><|tool_call_begin|>functions.read:0<|args|>{"path": "a.py"}'
                '<|tool_call_end|><|tool_calls|>'
            ),
            (
                *("<|section|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
                *("<|args|>", "<|tool_calls|>"),
            ),
        ),
        (
            FAMILIES["Devstral"].replace("[ARGS]", "[CALL_ID]{{ c.id }}[ARGS]"),
            '[TOOL_CALLS]read[ARGS]{"path": "a.py"}',
            ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        ),
    ],
)  # fmt: skip
def test_a_model_may_choose_among_marks(
    tmp_path: Path, template: str, text: str, controls: tuple[str, ...]
) -> None:
    template = template.replace("<|/section|>", "<|tool_calls|>")
    answer = asked_of(tmp_path, template, text, ASKED, controls=controls)
    assert message_of(answer) == ("", "", [("read", {"path": "a.py"})])
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("name", EDITS)
def test_arguments_are_written_as_the_family_does(tmp_path: Path, name: str) -> None:
    """In any order, with its quotes, and also without the line breaks of its template."""
    body = {**ASKED, "tools": [tool("edit", EDIT)]}
    answer = asked_of(tmp_path, FAMILIES[name], EDITS[name], body)
    old = "a < b>" if name == "Gemma" else "it's"
    expected = {"path": "a.py", "all": True, "old": old, "lines": [1, 2]}
    assert message_of(answer) == ("", "", [("edit", expected)])


@pytest.mark.parametrize("text", [FAMILY["Hermes"].call(), FENCED])
def test_on_all_apis_a_call_is_one(tmp_path: Path, text: str) -> None:
    """An invented one is another, and one in a fence counts where its name was offered."""
    family = FAMILY["Hermes"]
    target = write_model_that_says(
        tmp_path / "m.gguf", family.template, text, ASKED, family.controls
    )
    functions = [each["function"] for each in TOOLS]
    schemas = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    given = [{"type": "function", **each} for each in functions]
    session = session_of(target, max_tokens=200)
    with running(session, n_parallel=1, n_ctx=2048) as server:
        chat = server.post("/v1/chat/completions", **ASKED).json()
        message = server.post(
            "/v1/messages", messages=ASKED["messages"], tools=schemas, max_tokens=200
        )
        response = server.post("/v1/responses", input="look", tools=given).json()
    (block,) = [each for each in message.json()["content"] if each["type"] == "tool_use"]
    (item,) = [each for each in response["output"] if each["type"] == "function_call"]
    found = [
        *message_of(chat)[2],
        (block["name"], block["input"]),
        (item["name"], json.loads(item["arguments"])),
    ]
    assert len(found) == 3
    assert all(is_right(*call) and call == found[0] for call in found)
    assert text != FENCED or found[0] == ("read", {"path": "a.py"})


_MUSE = (
    "{%- for m in messages %}{% for c in m.tool_calls or [] %}"
    "<|start|>assistant to={{ c.function.name }}<|message|>"
    '<atem:function_calls>\n<atem:invoke name="{{ c.function.name }}">\n{% for k, '
    "v in c.function.arguments.items() %}"
    '<atem:parameter name="{{ k }}">{{ v if v is string else v | tojson }}</atem:parameter>\n'
    "{% endfor %}"
    "</atem:invoke>\n</atem:function_calls>{{ '<|eot|>' if loop.last else '<|eom|>' }}{% else %}"
    "<|start|>{{ m.role }}"
    "{{ ' to=user' if m.role == 'assistant' }}<|message|>{{ m.content }}<|eot|>{% endfor %}"
    "{% endfor %}"
    "{#- tools to=self<|message|> #}<|start|>assistant"
)
_CALL = FAMILY["Hermes"].call("read", 7)
_GIGA_MARK = "<|sep|>\n\nfunction call<role>"
_GIGA = FAMILIES["Hermes"].replace("<tool_call>", _GIGA_MARK)
_KIMI_3 = FAMILIES["Qwen-Coder"].replace("<tool_call>", "<|close|>response<|sep|><tool_call>")
#: What models of a family say, with all of its marks: "I think.", then "I look.", then the call.
SAID: dict[str, tuple[Family, str]] = {
    "the function is named in the header of its turn, and after it": (
        Family(_MUSE, ("<|start|>", "<|message|>", "<|eom|>")),
        (
            " to=self<|message|>I think.<|eom|><|start|>assistant to=user<|message|>I look.<|eom|>"
            "<|start|>assistant to=read<|message|><atem:function_calls>\n"
            '<atem:invoke name="read">\n'
            '<atem:parameter name="path">a.py</atem:parameter>\n'
            '<atem:parameter name="lines">7</atem:parameter>\n'
            "</atem:invoke>\n</atem:function_calls>"
        ),
    ),
    "the function is named in the head of its turn": (
        FAMILY["gpt-oss"],
        (
            "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>"
            "commentary<|message|>I look.<|end|>"
            "<|start|>assistant to=functions.read<|channel|>commentary json<|message|>"
            '{"path": "a.py", "lines": 7}<|call|>'
        ),
    ),
    "marks of the text before the call": (
        Family(_KIMI_3 + "{#- <|open|>think<|sep|> #}", ("<|open|>", "<|close|>", "<|sep|>")),
        "<|open|>think<|sep|>I think.<|close|>think<|sep|><|open|>response<|sep|>"
        "I look.<|close|>response<|sep|>" + FAMILY["Qwen-Coder"].call("read", 7),
    ),
    "a thought with a heading": (
        Family(FAMILIES["Hermes"] + "<|begin_assistant|>\nHere are my reasoning steps:\n"),
        f"I think.\n[BEGIN FINAL RESPONSE]\nI look.\n{_CALL}",
    ),
    "the mark of a call ends every turn": (
        Family(_GIGA + "<think>", ("<|sep|>",)),
        f"I think.</think>I look.{_CALL.replace('<tool_call>', _GIGA_MARK)}<|sep|>\n",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_no_mark_of_a_family_is_left_in_an_answer(tmp_path: Path, name: str) -> None:
    family, text = SAID[name]
    answer = asked_of(tmp_path, family.template, text, ASKED, controls=family.controls)
    content, thoughts, calls = message_of(answer)
    assert (content.strip(), thoughts.strip()) == ("I look.", "I think.")
    assert calls == [("read", {"path": "a.py", "lines": 7})]
