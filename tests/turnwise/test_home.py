"""A project folder that cannot be read or written is one sentence and status 2, before any work: through real
processes, as somebody without the right to.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_turnwise import TURNWISE, shell

pytestmark = pytest.mark.slow

# root reads and writes everything, until that right is taken from it.
CAPABILITIES = "-dac_override,-dac_read_search"
ANYBODY = f"setpriv --bounding-set={CAPABILITIES} --inh-caps={CAPABILITIES} " if os.geteuid() == 0 else ""


@pytest.fixture
def locked(home: Path) -> Iterator[Path]:
    """A project folder with a store, whose mode a test takes away."""
    if ANYBODY and not shutil.which("setpriv"):
        pytest.skip("only root, who may do everything, is here")
    (home / "data").mkdir(exist_ok=True)
    (home / "preset.toml").write_text("iterations = 0\n")
    yield home
    for folder in (home, home / "mlflow", home / "data"):
        folder.chmod(0o755)


@pytest.mark.parametrize(
    ("mode", "place", "command", "status", "told"),
    [
        (0o555, "mlflow", "run preset.toml --plain", 2, "wanted a project folder that can be written, but"),
        (0o000, "data", "run preset.toml --plain", 2, "wanted a project folder that can be written, but"),
        (0o000, ".", "runs", 2, "wanted a project folder that can be read, but"),
        (0o444, "mlflow", "show abc", 2, "wanted a project folder that can be read, but"),
        (0o555, "mlflow", "runs", 1, "cannot be opened for writing. Check who owns the folder"),
    ],
)
def test_a_folder_that_is_closed_is_one_sentence(
    mode: int, place: str, command: str, status: int, told: str, locked: Path
) -> None:
    (locked / place).chmod(mode)
    found, out, err = shell(f"{ANYBODY}{TURNWISE} {command} --home {locked}", Path("/"))
    assert (found, out, err.count("\n")) == (status, "", 1), err
    assert told in err
