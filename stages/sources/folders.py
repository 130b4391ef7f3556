"""A folder that appears complete or not at all, with a manifest. Ours."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.frame.types import UsageError

MANIFEST = "manifest.json"


@contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`, removed at the end unless it was moved. Raises UsageError where the disk fails."""
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        yield scratch
    except OSError as error:
        raise UsageError(
            f"data: {error.filename or folder.parent} cannot be used: {error.strerror or error}. Name folders that can be read and written."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def finish(made: Path, folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest, and put what was made in its place in one step."""
    (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    made.rename(folder)
