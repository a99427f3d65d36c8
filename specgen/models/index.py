"""The simple index of packages (PEP 503 as HTML, PEP 691 as JSON): which files there are."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from specgen.errors import FetchError
from specgen.models.fetch_errors import shown_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specgen.models.transfer import Page

ACCEPT = (
    "application/vnd.pypi.simple.v1+json, "
    "application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
)

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A file that an index lists. `sha256` is None where the index gives none."""

    name: str
    url: str
    sha256: str | None


def normalized(package: str) -> str:
    """Return the name under which an index lists `package` (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def parse_page(page: Page) -> tuple[IndexFile, ...]:
    """Return the files that a page of an index lists. Raise FetchError if it is not such a page.

    The answer may be HTML though JSON was asked for, as not every mirror knows both.
    """
    media_type = page.content_type.partition(";")[0].strip().lower()
    if media_type == "application/json" or media_type.endswith("+json"):
        return _parse_json(page)
    return _parse_html(page)


def find_wheel(files: Sequence[IndexFile], package: str, version: str) -> IndexFile | None:
    """Return the wheel of exactly that version; the one for every system, if there are several."""
    wanted = (normalized(package), version)
    wheels = [file for file in files if _wheel_of(file.name) == wanted]
    for wheel in wheels:
        if wheel.name.endswith("-none-any.whl"):
            return wheel
    return wheels[0] if wheels else None


def _wheel_of(file_name: str) -> tuple[str, str] | None:
    """Return package and version from the name of a wheel; None for other files."""
    fields = file_name.removesuffix(".whl").split("-")
    if not file_name.endswith(".whl") or len(fields) not in {5, 6}:
        return None
    return normalized(fields[0]), fields[1]


def _parse_json(page: Page) -> tuple[IndexFile, ...]:
    broken = FetchError(f"{shown_url(page.url)} is not a package index: its JSON has another form")
    try:
        document: object = json.loads(page.text)
    except (ValueError, RecursionError) as error:
        raise broken from error
    entries = document.get("files") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise broken
    files = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise broken
        name, url, hashes = entry.get("filename"), entry.get("url"), entry.get("hashes")
        if not isinstance(name, str) or not isinstance(url, str):
            raise broken
        sha256 = hashes.get("sha256") if isinstance(hashes, dict) else None
        files.append(IndexFile(name, urljoin(page.url, url), _checked_sha256(sha256)))
    return tuple(files)


def _parse_html(page: Page) -> tuple[IndexFile, ...]:
    parser = _Links()
    parser.feed(page.text)
    parser.close()
    base = urljoin(page.url, parser.base)
    files = []
    for link in parser.links:
        url, fragment = urldefrag(urljoin(base, link))
        name = unquote(urlsplit(url).path.rpartition("/")[2])
        algorithm, _, digest = fragment.partition("=")
        sha256 = digest if algorithm == "sha256" else None
        files.append(IndexFile(name, url, _checked_sha256(sha256)))
    return tuple(files)


def _checked_sha256(value: object) -> str | None:
    if isinstance(value, str) and _SHA256.fullmatch(value.lower()):
        return value.lower()
    return None


class _Links(HTMLParser):
    """Collects where the anchors of a page lead, and what they are relative to."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.links: list[str] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if href and tag == "a":
            self.links.append(href)
        elif href and tag == "base" and not self.base:
            self.base = href
