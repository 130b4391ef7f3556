"""Task data that tests may use and the repository does not hold: MATH, Wikipedia pages, published puzzles.

It lies in the folder that the environment variable TURNWISE_DATA names, else in ../shared/data beside the repository.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("TURNWISE_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


def needs(path: Path) -> pytest.MarkDecorator:
    """Skips a test, saying so, where the file or folder is not there."""
    return pytest.mark.skipif(
        not path.exists(), reason=f"{path} is not there; TURNWISE_DATA names the folder of the task data"
    )
