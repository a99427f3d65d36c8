"""Docstrings of functions begin with a verb in the imperative: "Return ...", "Decode ..."."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "specgen"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: The verbs that docstrings begin with. Add one if none of these fits; a noun or "Returns" is a mistake.
_VERBS = """
Accept Add Advance Allocate Announce Answer Append Apply Ask Assign Attach Begin Block Bring Build Call
Cancel Carry Change Check Choose Clear Close Collect Combine Commit Compare Compile Compute Connect
Convert Copy Count Create Cut Decide Declare Decode Delete Derive Describe Detect Disable Discard Divide
Do Download Draft Draw Drop Empty Enable Encode End Enter Estimate Evaluate Exit Expand Extend Fetch Fill
Find Finish Fit Follow Forget Format Forward Free Generate Get Give Go Group Guess Hand Handle Hide Hold
Ignore Insert Interpolate Join Judge Keep Lay Learn Leave Let Limit List Load Log Look Lower Make Map Mark
Match Measure Merge Move Multiply Name Note Observe Offer Open Order Pack Parse Pass Pick Place Plan
Prefill Prepare Print Probe Propose Publish Put Quantise Queue Raise Read Rebuild Record Redirect Reduce
Refuse Register Reject Release Reload Remember Remove Render Repeat Replace Replay Report Request Reserve
Reset Resolve Respond Restore Resume Retry Return Reuse Rewind Roll Round Run Sample Save Say Scale Search
See Select Send Serve Set Share Show Shut Simulate Skip Slide Sort Spell Split Start Step Stop Store
Stream Submit Subtract Sum Switch Take Talk Tell Test Time Tokenize Train Translate Truncate Try Turn
Undo Unload Update Use Verify Wait Walk Warn Wrap Write Yield
"""
VERBS = frozenset(_VERBS.split())


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods; properties describe a value, so that a noun suits them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
            if "property" not in decorators and ".setter" not in decorators:
                yield node


def in_another_mood(source: str) -> list[str]:
    """Return line, name and first word of the docstrings that do not begin with one of `VERBS`."""
    found = []
    for function in functions(ast.parse(source)):
        docstring = ast.get_docstring(function)
        first = re.match(r"\w*", docstring or "Return")
        if first is None or first[0] not in VERBS:
            found.append(
                f"{function.lineno} {function.name}: {(docstring or '').partition(chr(10))[0]}"
            )
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_begin_with_a_verb(module: Path) -> None:
    assert in_another_mood(module.read_text(encoding="utf-8")) == []


def test_another_mood_is_found() -> None:
    source = '''
def right():
    """Return a value."""

def without(): ...

class Noun:
    """A noun."""

    @property
    def size(self):
        """The size."""

    def third_person(self):
        """Returns a value."""

    def question(self):
        """Whether it is so."""

async def code():
    """`value` of it."""
'''
    assert [each.split(":")[0] for each in in_another_mood(source)] == [
        "20 code", "14 third_person", "17 question",
    ]  # fmt: skip
