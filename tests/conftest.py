"""Fixtures that several test files share: an initialised MLflow store is made once, then copied."""

from __future__ import annotations

from pathlib import Path

import pytest
from toys import toy_workspace

from stages import sqlite
from stages.execute import Workspace
from stages.tracking import Tracking


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Database of a new MLflow store. Making one takes seconds, copying it milliseconds."""
    root = tmp_path_factory.mktemp("mlflow")
    Tracking(root).initialise()
    return root / "mlflow.db"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny base model with random weights and the project's tokenizer."""
    from models import save_base

    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def home(tmp_path: Path, empty_store: Path) -> Path:
    """A project folder with an initialised, empty store."""
    (tmp_path / "mlflow").mkdir()
    sqlite.copy(empty_store, tmp_path / "mlflow" / "mlflow.db")
    return tmp_path


@pytest.fixture
def workspace(home: Path) -> Workspace:
    """Stores in `home`, no engine, one base model named "base" and no prompts."""
    return toy_workspace(home)
