"""What the wheel carries beside the code: the small base models and the studies.

A checkout has them in the project folder and does not use this module. An installed wheel copies a model into the
project folder when a config names it. So paths and fingerprints equal those of a checkout.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "shipped"
MODELS = ("base", "base_agents", "base_maths", "base_twenty", "base_wide", "smollm2_desk")


def bring(path: str) -> None:
    """Copy the wheel's model that `path` names into the project folder, unless it is there. `path` may also name a file
    in it.

    path: as in a config, from the project folder, where the process works. Example: "data/base".
    """
    place = Path(*Path(path).parts[:2])
    source = FOLDER / place
    if not source.is_dir() or os.path.lexists(place):
        return
    place.parent.mkdir(exist_ok=True)
    made = place.with_name(f".{place.name}-{os.getpid()}")
    shutil.copytree(source, made)
    try:
        made.rename(place)
    except OSError:  # another process was quicker
        shutil.rmtree(made)
        return
    print(f"{place} is copied from the installed package.", file=sys.stderr)


def there(path: str) -> bool:
    """Whether a config's path exists, or would be copied from the wheel."""
    return os.path.exists(path) or (not os.path.lexists(Path(*Path(path).parts[:2])) and (FOLDER / path).exists())


def study(file: Path) -> Path:
    """A study's file. If there is none, the wheel's file of this name."""
    carried = FOLDER / "studies" / file.name
    return carried if not file.is_file() and file.parent.name == "studies" and carried.is_file() else file
