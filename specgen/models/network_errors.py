"""Network errors, turned into specgen's own errors, which say what to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from specgen.errors import FetchError, SpecgenError, UnknownModelError
from specgen.models.hub_names import page_of

#: The environment variable with the address of a package index that replaces PyPI's.
INDEX_VARIABLE = "SPECGEN_PYPI_INDEX"
#: The errors of code that reads an answer of an unexpected form.
_UNEXPECTED_ANSWER = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


@contextmanager
def requests_to(url: str, repo: str = "") -> Iterator[None]:
    """Turn network errors of huggingface_hub and its client in the block into specgen's own.

    Disk errors pass through.

    Args:
        url: The address that the block requests.
        repo: The repository to which it belongs; empty for PyPI.

    Raises:
        FetchError: If a request failed, or the answer was unexpected.
        UnknownModelError: If there is no such repository.
    """
    try:
        yield
    except SpecgenError:
        raise
    except Exception as error:
        if _is_disk_error(error):
            raise
        raise _translate(error, url, repo) from error


def without_secrets(url: str) -> str:
    """Return an address without the parts that may be secret: user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _is_disk_error(error: Exception) -> bool:
    """Return whether an error came from the operating system, but not from the network."""
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return False
    # Clients derive their own errors from OSError, but those have no error number.
    return isinstance(error, OSError) and error.errno is not None


def _translate(error: Exception, url: str, repo: str) -> SpecgenError:
    """Return specgen's own error for an error of a request: what failed, and what to do."""
    causes = _causes(error)
    for cause in causes:
        refusal = _refusal(cause, url, repo)
        if refusal is not None:
            return refusal
    host = urlsplit(without_secrets(url)).netloc
    if isinstance(error, _UNEXPECTED_ANSWER):
        return FetchError(
            f"{host} does not answer as expected",
            "the network may require you to sign in, "
            f"or HF_ENDPOINT or {INDEX_VARIABLE} may be wrong",
        )
    reason = str(error).strip() or type(error).__name__
    # The operating system's text of the deepest cause that has one is the clearest: "Connection
    # refused".
    for cause in causes:
        if isinstance(cause, OSError) and cause.strerror:
            reason = cause.strerror
    reason = reason.splitlines()[0].rstrip(".")
    return FetchError(
        f"the connection to {host} failed: {reason}",
        "check the network, and HTTPS_PROXY if there is a proxy; then try again: "
        "what was downloaded is kept",
    )


def _causes(error: Exception) -> list[BaseException]:
    """Return an error and the chain of its causes, the deepest one last."""
    causes: list[BaseException] = [error]
    while True:
        cause = causes[-1].__cause__ or causes[-1].__context__
        if cause is None or cause in causes:
            return causes
        causes.append(cause)


def _refusal(
    error: BaseException,
    url: str,
    repo: str,
) -> SpecgenError | None:
    """Return specgen's error if a server, or huggingface_hub itself, refused a request.

    Args:
        error: An error of the request, or one of its causes.
        url: The address that was requested.
        repo: The repository to which it belongs; empty for PyPI.

    Returns:
        None if `error` does not mean a refusal.
    """
    from huggingface_hub import errors, get_token

    if isinstance(error, errors.OfflineModeIsEnabled):
        return FetchError("HF_HUB_OFFLINE is set", "unset it to download models")
    if isinstance(error, errors.GatedRepoError):
        problem = "and your token gives no access to it" if get_token() else "and needs a token"
        return FetchError(
            f"{repo} is gated, {problem}",
            f"ask its authors for access on {page_of(repo)}, "
            "then set HF_TOKEN (or --hf-token) to your token",
        )
    response = getattr(error, "response", None)
    if response is None:
        return None
    status = response.status_code
    # Mirrors of the hub may answer with a plain 404, for which there is no RepositoryNotFoundError.
    is_missing_listing = status == 404 and "/api/models/" in str(response.url)
    if isinstance(error, errors.RepositoryNotFoundError) or is_missing_listing:
        host = urlsplit(without_secrets(url)).netloc
        return UnknownModelError(
            f"{host} has no repository {repo}, or it is private",
            f"check the name on {page_of(repo)}; for a private one, set HF_TOKEN (or --hf-token)",
        )
    hint = f"check HF_TOKEN, and {page_of(repo)}" if repo else f"{INDEX_VARIABLE} names a mirror"
    return FetchError(f"{without_secrets(url)} answered with status {status}", hint)
