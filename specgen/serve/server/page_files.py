"""The files of the chat page, and the headers that protect it."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles

# Some systems map .js to plain text, and browsers do not run scripts of that type.
for _ending in (".js", ".mjs"):
    mimetypes.add_type("text/javascript", _ending)
#: Only the page's own files may be loaded: no scripts or styles from elsewhere or within a model's
#: answers. Hosts that an answer links to are not looked up in advance.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-DNS-Prefetch-Control": "off",
    "Cache-Control": "no-cache",
}


class _PageFiles(StaticFiles):
    """Serves the files with `_HEADERS`."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return the response with a file, with the headers added."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


PAGE = _PageFiles(directory=Path(__file__).parent / "page")
