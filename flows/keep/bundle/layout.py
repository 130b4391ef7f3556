"""The manifest of a bundle, and what may lie in one: names that stay in the folder, and files that are data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from stages.store.mlflow_run import Record

SCHEMA = 1
MANIFEST, HASHES, RECORD = "bundle.json", "sha256.json", "run.json"
RUNS, ARTIFACTS, FILES, PROMPTS = "runs", "artifacts", "files", "prompts"
DATA = (
    ".json", ".jsonl", ".parquet", ".safetensors", ".png", ".svg", ".html", ".md", ".txt", ".toml", ".csv", ".tsv", ".jinja",
)  # fmt: skip
"""Endings of files that nobody runs when they are read: no pickle, no code."""
LARGEST = 64 * 2**20  # bytes of a file or folder that a config names; a larger one is named by its hash


class LeftOut(BaseModel):
    """What a config names and the bundle does not hold. sha256: as `stages.store.contents.path_hash` has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    sha256: str
    size_bytes: int


class Manifest(BaseModel):
    """bundle.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["turnwise bundle"]
    schema_version: int
    replay_schema: int  # of the rows' tables
    git_commit: str
    run: str  # the pipeline run, which is also the last one of `runs`
    runs: list[str] = Field(min_length=1)  # inputs before those that read them
    left_out: list[LeftOut]


@dataclass(frozen=True)
class Bundle:
    """A folder that was found to be whole."""

    folder: Path
    manifest: Manifest
    records: tuple[Record, ...]  # in the order of the manifest's runs

    def artifacts(self, run_id: str) -> Path:
        return self.folder / RUNS / run_id / ARTIFACTS

    @property
    def files(self) -> list[str]:
        """Paths in a project folder of what the bundle holds beside the runs."""
        start = self.folder / FILES
        return sorted(str(file.relative_to(start)) for file in start.rglob("*") if file.is_file())


def stays_inside(path: str) -> bool:
    """Whether a path names, in plain words, something below the folder that it counts from, and nothing hidden there."""
    parts = PurePosixPath(path).parts
    odd = path.startswith("/") or "\\" in path or ":" in path or "\0" in path
    return bool(parts) and not odd and str(PurePosixPath(path)) == path and not any(p.startswith(".") for p in parts)


def is_data(path: str) -> bool:
    return path.endswith(DATA)
