"""The files of the page for browsers, and the headers that protect it."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles

# Some machines map .js to plain text, and browsers do not run such a script.
for _ending in (".js", ".mjs"):
    mimetypes.add_type("text/javascript", _ending)
#: The page's own files only: no scripts or styles from elsewhere, or in the answers of a model, and
#: no look-up of the hosts that an answer has links to.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-DNS-Prefetch-Control": "off",
    "Cache-Control": "no-cache",
}


class _PageFiles(StaticFiles):
    """Files with these headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return the response with a file."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


PAGE = _PageFiles(directory=Path(__file__).parent / "page")
