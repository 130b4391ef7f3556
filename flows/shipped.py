"""What the wheel carries beside the code: the small base models and the studies.

In a checkout they lie in the project folder, and nothing here is used. Where turnwise was installed from its wheel, a
model that a config names and the project folder lacks is copied there, so that its paths, and with them fingerprints,
are those of a checkout.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "shipped"
MODELS = ("base", "base_agents", "base_maths", "base_twenty")


def bring(path: str) -> None:
    """Copy the model of the wheel that `path` names, or a file in it, into the project folder; nothing where it is there.

    path: as a config has it, from the project folder on, which the process works in: "data/base".
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
    """Whether a path of a config is there, or would be brought."""
    return os.path.exists(path) or (not os.path.lexists(Path(*Path(path).parts[:2])) and (FOLDER / path).exists())


def study(file: Path) -> Path:
    """A study's file: where there is none, the one of this name that the wheel carries."""
    carried = FOLDER / "studies" / file.name
    return carried if not file.is_file() and file.parent.name == "studies" and carried.is_file() else file
