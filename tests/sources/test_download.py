"""Downloads: https, retries, a bar, and one sentence for whatever goes wrong. Served from loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from file_server import FileServer

from stages.frame.types import TurnwiseError, UsageError
from stages.sources import download as module
from stages.sources.download import download


class Bar:
    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        BARS.append(self)

    def advance(self, n: int = 1) -> None:
        self.done += n


BARS: list[Bar] = []


@pytest.fixture
def server() -> Iterator[FileServer]:
    BARS.clear()
    found = FileServer()
    yield found
    found.close()


def get(url: str) -> bytes:
    return download(url, Bar, backoff_s=0.001, timeout_s=5)


def test_a_file_comes_whole_and_the_bar_reaches_its_end(server: FileServer) -> None:
    server.files["/a/file.csv"] = body = bytes(range(256)) * 1000
    assert get(f"{server.url}/a/file.csv") == body
    (bar,) = BARS
    assert (bar.what, bar.total, bar.done) == ("file.csv (kB)", 256, 256)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(server: FileServer, status: int) -> None:
    server.files["/file"] = b"here"
    server.troubles["/file"] = [status, status]
    assert get(f"{server.url}/file") == b"here"
    assert len(server.asked) == 3


def test_retries_come_to_an_end(server: FileServer) -> None:
    server.troubles["/file"] = [503] * 99
    with pytest.raises(TurnwiseError, match=r"answered with status 503\. .*--from FOLDER"):
        get(f"{server.url}/file")
    assert len(server.asked) == module._RETRIES + 1


def test_a_missing_file_is_not_asked_for_again(server: FileServer) -> None:
    with pytest.raises(TurnwiseError, match="status 404"):
        get(f"{server.url}/file")
    assert len(server.asked) == 1


def test_a_file_that_is_cut_off_is_an_error_and_not_a_short_file(server: FileServer) -> None:
    server.files["/file"] = b"x" * 1000
    server.troubles["/file"] = ["cut"]
    with pytest.raises(TurnwiseError, match="cannot be fetched"):
        get(f"{server.url}/file")


def test_a_redirect_is_not_followed(server: FileServer) -> None:
    server.files["/elsewhere"] = b"another file"
    server.troubles["/file"] = ["moved"]
    with pytest.raises(TurnwiseError, match="status 302"):
        get(f"{server.url}/file")
    assert server.asked == ["/file"]


def test_a_file_without_end_is_given_up(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 3 << 20)
    server.troubles["/file"] = ["endless"]
    with pytest.raises(TurnwiseError, match="more than 3 MB"):
        get(f"{server.url}/file")


def test_no_server_is_one_sentence_that_names_the_way_without_a_network() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(
        TurnwiseError, match=r"cannot be fetched: Connection refused\. Without a network, .*--from FOLDER"
    ) as caught:
        get(f"http://127.0.0.1:{port}/file")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["http://example.org/file", "ftp://127.0.0.1/file", "file:///etc/passwd", "http://127.0.0.1.example.org/file", "x"],
)
def test_nothing_but_https_is_fetched_from_elsewhere(url: str) -> None:
    with pytest.raises(UsageError, match="https"):
        get(url)
