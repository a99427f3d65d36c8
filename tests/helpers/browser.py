"""A headless Chromium for tests of web pages."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ElementHandle, Locator, sync_playwright

#: The program to take; without it, the first of these names that is on the PATH.
CHROMIUM_VARIABLE = "SPECGEN_TEST_CHROMIUM"
_NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser without a window. Skips the test where no Chromium is installed."""
    program = os.environ.get(CHROMIUM_VARIABLE) or next(
        filter(None, map(shutil.which, _NAMES)), None
    )
    if program is None:
        pytest.skip(f"no Chromium: install {_NAMES[0]}, or name one in {CHROMIUM_VARIABLE}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


def luminance(element: Locator | ElementHandle, name: str) -> float:
    """The relative luminance of a colour of an element, from 0 to 1."""
    style = element.evaluate("(element, name) => getComputedStyle(element)[name]", name)
    parts = [int(part) / 255 for part in re.findall(r"\d+", style)[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: float, other: float) -> float:
    """The contrast of two luminances, from 1 to 21."""
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
