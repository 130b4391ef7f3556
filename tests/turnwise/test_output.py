"""A run never dies of its display, in real shells and on a real terminal; a command that only prints ends quietly or
says what it could not write.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from fake_turnwise import TURNWISE, shell

from stages.store.tracking import Tracking
from turnwise.output import lasting

HERE = Path(__file__).parents[1]
RUN = f"{TURNWISE} run preset.toml --plain"
FULL = "turnwise: what was printed could not be written (No space left on device).\n"


@pytest.fixture
def folder(home: Path) -> Path:
    (home / "data").mkdir(exist_ok=True)
    (home / "preset.toml").write_text("iterations = 2\n")
    return home


def ends(folder: Path) -> list[str]:
    return [info.status for info in Tracking(folder / "mlflow").runs("pipeline", 9)]


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["| head -1", ">/dev/full 2>/dev/full", "<&- >&- 2>&-"])
def test_a_run_goes_on_whatever_becomes_of_its_output(streams: str, folder: Path) -> None:
    status, out, err = shell(f"{RUN} {streams}", folder)
    assert (status, ends(folder)) == (0, ["FINISHED"])
    assert "Traceback" not in out + err
    assert len(out.splitlines()) == (streams == "| head -1")


@pytest.mark.slow
def test_a_run_that_nobody_reads_still_fails_with_its_own_status(folder: Path) -> None:
    status, out, err = shell(f"{RUN} | head -1", folder, FAIL_AT="critic")
    assert (status, ends(folder), out.count("\n")) == (1, ["FAILED"], 1)
    assert err.splitlines()[-1] == "turnwise: EngineUnavailable: nobody answers"


@pytest.mark.slow
def test_a_terminal_that_cannot_encode_the_bars_gets_them_in_ascii(folder: Path) -> None:
    """On a terminal of its own, where the bars move as well."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "PYTHONIOENCODING": "ascii", "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        ["bash", "-c", f"exec {RUN}"], cwd=folder, env=env, stdout=theirs, stderr=theirs, stdin=theirs
    ) as run:
        os.close(theirs)
        said = b""
        while chunk := _read(ours):
            said += chunk
    os.close(ours)
    assert (run.returncode, ends(folder)) == (0, ["FINISHED"])
    text = said.decode("ascii")
    assert "Traceback" not in text and "\\u" not in text
    assert "0.50 0.40-0.60  ############" in text
    assert "validation  _:=  0.10 -> 0.50" in text


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the other side is gone
        return b""


def test_what_has_no_likeness_in_ascii_is_a_question_mark() -> None:
    lasting()
    assert "██▍ ▁▂▃▄▅▆▇█ é→".encode("ascii", "turnwise.ascii") == b"## _.:-=+*# ??"
    assert "█ é".encode("latin-1", "turnwise.ascii") == b"# \xe9"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["stages", "--help"])
def test_a_command_that_prints_ends_quietly_when_nobody_reads_on(command: str, tmp_path: Path) -> None:
    status, out, err = shell(f"{TURNWISE} {command} | head -1", tmp_path)
    assert (status, out.count("\n"), err) == (0, 1, "")


@pytest.mark.slow
def test_results_that_cannot_be_written_are_one_sentence_and_status_1(tmp_path: Path) -> None:
    assert shell(f"{TURNWISE} stages >/dev/full", tmp_path) == (1, "", FULL)
    assert shell(f"{TURNWISE} stages >&-", tmp_path) == (0, "", "")


def test_a_closed_stream_s_number_is_given_to_no_file(tmp_path: Path) -> None:
    code = "from turnwise.output import lasting; lasting(); import os; os._exit(open(os.devnull).fileno())"
    assert shell(f"{sys.executable} -c '{code}' <&- >&- 2>&-", tmp_path)[0] > 2


def test_what_is_told_is_seen_at_once_in_a_container_that_asks_for_no_buffers() -> None:
    code = "import sys, os; from turnwise.output import lasting; lasting(); print('told', file=sys.stderr); os._exit(0)"
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == "told\n"
