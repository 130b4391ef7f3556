"""README fits on one page, and its environment keeps the contract."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from documents import FENCE, ROOT, text_of

from stages.envs import suite
from stages.frame import own


def test_readme_is_one_page() -> None:
    assert len(text_of(ROOT / "README.md").splitlines()) <= 130


def test_the_environment_of_readme_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, code),) = [one for one in FENCE.findall(text_of(ROOT / "README.md")) if one[0] == "python"]
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "door.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        found = list(suite.examine(suite.Subject("my.door", {}, None, ["Action: push"])))
    finally:
        for name in ("my.door", "my"):
            sys.modules.pop(name, None)
        own._imported.cache_clear()
    assert len(found) >= 12
    assert not [one for one in found if one.status == "broken"]
