"""The small real model that a package ships, and the same warmed for the desk. `make test-real` brings both, `make
test-vllm` the first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

MODELS = Path(__file__).parents[1] / "data" / "models"


def folder(name: str) -> Path:
    if not (MODELS / name / "manifest.json").is_file():
        pytest.skip(f"data/models/{name} is not here; make test-real brings it")
    return MODELS / name


@pytest.fixture(scope="session")
def smol() -> Path:
    return folder("smollm2")


@pytest.fixture(scope="session")
def warmed() -> Path:
    return folder("smollm2_desk")
