"""A headless Chromium for tests of web pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

#: The environment variable that names the browser's program.
CHROMIUM_VARIABLE = "SPECGEN_TEST_CHROMIUM"
#: Without the variable, the first of these programs on the PATH is used.
_NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless browser. Without Chromium, the test is skipped."""
    program = _chromium()
    if program is None:
        pytest.skip(f"no Chromium: install {_NAMES[0]}, or name one in {CHROMIUM_VARIABLE}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@pytest.fixture
def keeping_browser(browser: Browser) -> Iterator[Browser]:
    """A browser with a back-forward cache, which restores a page when the user goes back to it."""
    kept = browser.browser_type.launch(
        executable_path=_chromium(), ignore_default_args=["--disable-back-forward-cache"]
    )
    with kept:
        yield kept


def _chromium() -> str | None:
    named = os.environ.get(CHROMIUM_VARIABLE)
    if named:
        return named
    for name in _NAMES:
        program = shutil.which(name)
        if program is not None:
            return program
    return None
