"""README fits on one page, and its environment keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest
from documents import FENCE, ROOT, own_module, text_of

from stages.envs import suite


def test_readme_is_one_page() -> None:
    assert len(text_of(ROOT / "README.md").splitlines()) <= 130


def test_the_environment_of_readme_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, code),) = [one for one in FENCE.findall(text_of(ROOT / "README.md")) if one[0] == "python"]
    with own_module(tmp_path, "my.door", code, monkeypatch) as name:
        found = list(suite.examine(suite.Subject(name, {}, None, ["Action: push"])))
    assert len(found) >= 12
    assert not [one for one in found if one.status == "broken"]
