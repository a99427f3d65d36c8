"""specgen's own prompts, used if the user gives none.

Drafts differ most between their categories: new code, where a small model is often right; editing, where the
prompt contains most of the answer; prose, which is hard to predict; and questions as people ask them.
"""

from __future__ import annotations

_AVERAGES = """\
def average(values):
    x = 0
    for value in values:
        x = x + value
    if len(values) == 0:
        return 0
    return x / len(values)


def variance(values):
    mean = average(values)
    x = 0
    for value in values:
        x = x + (value - mean) ** 2
    if len(values) == 0:
        return 0
    return x / len(values)
"""

_STACK = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]
"""

_CART = """\
function total(cart) {
  var sum = 0;
  for (var i = 0; i < cart.items.length; i++) {
    var item = cart.items[i];
    if (item.quantity > 0) {
      sum = sum + item.price * item.quantity;
    }
  }
  if (cart.discount) {
    sum = sum - sum * cart.discount;
  }
  return sum;
}
"""

_SERVER = """\
[server]
host = "127.0.0.1"
port = 8080
workers = 4

[server.log]
level = "info"
file = "/var/log/server.log"

[database]
url = "postgres://localhost/app"
pool = 10
timeout = 30
"""

_RENAME = "Rename the variable `x` to `total` and add type hints. Answer with the whole code."
_DOCUMENT = "Add a docstring to each method and change nothing else. Answer with the whole code."
_MODERNISE = "Use const and let in place of var and a for...of loop. Answer with the whole code."
_CONVERT = "Turn this configuration into JSON with the same values, and change nothing else."

#: By category.
OWN_PROMPTS: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function that merges two sorted lists, with a docstring and a test.",
        "Implement a least-recently-used cache class in Python with get, put and a maximum size.",
        "Write SQL that creates tables for books and their authors, and finds the busiest author.",
        "Write a C function that reverses the words of a string in place, without allocating.",
    ),
    "edit": (
        f"{_RENAME}\n\n```python\n{_AVERAGES}```",
        f"{_DOCUMENT}\n\n```python\n{_STACK}```",
        f"{_MODERNISE}\n\n```javascript\n{_CART}```",
        f"{_CONVERT}\n\n```toml\n{_SERVER}```",
    ),
    "prose": (
        "Explain in three paragraphs why the sea is salty and lakes mostly are not.",
        "Continue the story: The lighthouse had been dark for eleven years when the letter came.",
        "Write a polite letter to a neighbour who plays the drums at night.",
        "Describe a walk through a harbour town on a foggy morning.",
    ),
    "chat": (
        "My sourdough never rises. What should I check first?",
        "Which is heavier, a litre of ice or a litre of water? Say why.",
        "Can you compare a stack and a queue in a table with three rows?",
        "I have two days in Lisbon, and it will rain. What do you suggest?",
    ),
}
