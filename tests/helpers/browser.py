"""A headless Chromium for tests of web pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

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
