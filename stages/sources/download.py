"""One file over https, with retries and a progress bar. http is for this machine's loopback only, where tests serve
files. Ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from stages.frame.contract import Progress
from stages.frame.sections import is_loopback
from stages.frame.types import TurnwiseError, UsageError

LARGEST = 64 << 20  # bytes of a file; the largest published one has 3 MB
_RETRIES = 4
_PIECE = 1 << 16

Bar = Callable[[str, int], Progress]
"""(what, total) -> a bar."""


def download(url: str, bar: Bar, *, timeout_s: float = 30.0, backoff_s: float = 0.5) -> bytes:
    """The file's bytes. Tries again where the server is out of reach, busy or broken, with growing pauses.

    Raises UsageError for an address without https, TurnwiseError in one sentence where the file does not come.
    """
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    parts = urlsplit(url)
    local = is_loopback(parts.hostname or "")
    if parts.scheme != "https" and not (parts.scheme == "http" and local):
        raise UsageError(f"data: wanted an address with https, found {url!r}.")
    retry = Retry(_RETRIES, backoff_factor=backoff_s, status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False)
    with requests.Session() as session:
        session.mount(f"{parts.scheme}://", HTTPAdapter(max_retries=retry))
        session.trust_env = not local  # a proxy cannot reach this machine's loopback
        try:
            # Not compressed, so that the length is known. No redirect: a file at a commit has one place, and a redirect
            # could leave https.
            headers = {"Accept-Encoding": "identity"}
            with session.get(url, stream=True, timeout=timeout_s, allow_redirects=False, headers=headers) as reply:
                if reply.status_code != 200:
                    raise TurnwiseError(f"{url} answered with status {reply.status_code}. {_OFFLINE}")
                return _read(reply.iter_content(_PIECE), int(reply.headers.get("Content-Length", 0)), url, bar)
        except requests.RequestException as error:
            raise TurnwiseError(f"{url} cannot be fetched: {_reason(error)}. {_OFFLINE}") from error


_OFFLINE = "Without a network, name a folder that holds the files: turnwise data fetch TASK --from FOLDER"


def _read(pieces: Iterable[bytes], total: int, url: str, bar: Bar) -> bytes:
    shown = bar(f"{url.rpartition('/')[2]} (kB)", max(1, total // 1000))
    found, told = bytearray(), 0
    for piece in pieces:
        found += piece
        if len(found) > LARGEST:
            raise TurnwiseError(f"{url} holds more than {LARGEST >> 20} MB, so it is not the file that was meant.")
        shown.advance(len(found) // 1000 - told)
        told = len(found) // 1000
    return bytes(found)


def _reason(error: Exception) -> str:
    """The innermost cause that says something, without the libraries' names for each other."""
    while (inner := error.__cause__ or error.__context__) is not None and isinstance(inner, Exception):
        error = inner
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
