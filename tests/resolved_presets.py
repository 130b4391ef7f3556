"""What the presets came to before they were parted into tasks, methods and models: `resolved_presets.json`, a line each.

    PYTHONPATH=. python tests/resolved_presets.py      # writes it anew, from the presets of today

A line holds what differs from the defaults of the code, so that a new key of a config needs no new line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows import presets

FILE = Path(__file__).parent / "flows" / "resolved_presets.json"


def resolved(name: str) -> dict[str, Any]:
    """All values of a preset that differ from the defaults; its name is none of them."""
    found = presets.load(name).model_dump(mode="json", exclude={"preset"})
    return _differing(presets.resolve({}).model_dump(mode="json"), found)


def _differing(plain: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _differing(plain[key], value) if isinstance(value, dict) and plain[key] else value
        for key, value in found.items()
        if value != plain[key]
    }


def stored() -> dict[str, dict[str, Any]]:
    """Name of before -> its values."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    lines = [
        f"{json.dumps(name)}: {json.dumps(resolved(name))}" for name in (stored() if FILE.exists() else presets.names())
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
