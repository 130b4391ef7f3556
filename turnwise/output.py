"""Standard output and standard error that never end a command. Text that nobody can read any more is dropped. Text that
cannot be encoded becomes ASCII.

So a run goes on to its end with `head -1`, >&-, >/dev/full, or a terminal without UTF-8.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from typing import Any

# The bars and curves of flows/report.py; what has no likeness here becomes a question mark.
_ASCII = dict(zip("▏▎▍▌▋▊▉█▁▂▃▄▅▆▇", ("", "", "", *"#####_.:-=+*"), strict=True))


_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def visible(value: Any) -> Any:
    """Stored values, made safe for a terminal: a reply could move its cursor or change its settings."""
    if isinstance(value, str):
        return value.translate(_CONTROLS)
    if isinstance(value, dict):
        return {key: visible(one) for key, one in value.items()}
    return [visible(one) for one in value] if isinstance(value, list) else value


class Outlet(io.FileIO):
    """A file that becomes /dev/null at the first failed write. lost: that failure."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # a pipe that somebody made non-blocking is full
                select.select([], [self], [])
            return written
        except OSError as error:  # what was to be shown is no reason to give up what is being done
            self.lost = self.lost or error
            # The descriptor itself, which libraries in C and commands started from here write to as well.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return super().write(data)


def lasting() -> list[Outlet]:
    """Replace this process's stdout and stderr by outlets, and return them. A stream that was replaced stays."""
    codecs.register_error("turnwise.ascii", _in_ascii)
    if sys.stdin is None:  # closed; first, so that what is opened next does not take its number
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    return [_put_in_place(name) for name in ("stdout", "stderr") if getattr(sys, name) is getattr(sys, f"__{name}__")]


def _put_in_place(name: str) -> Outlet:
    stream = getattr(sys, name)
    # None: it was closed (`>&-`). What is opened instead takes its number, which a database's file would get otherwise.
    outlet = Outlet(os.devnull, "wb") if stream is None else Outlet(stream.fileno(), "wb", closefd=False)
    # Written through: as PYTHONUNBUFFERED, which containers like to set, has it in place of by line.
    by_line = stream is not None and (stream.line_buffering or stream.write_through)
    encoding = "utf-8" if stream is None else stream.encoding
    setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(outlet), encoding, "turnwise.ascii", line_buffering=by_line))
    return outlet


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(letter, "?") for letter in error.object[error.start : error.end]), error.end
