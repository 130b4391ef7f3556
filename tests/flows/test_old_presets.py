"""The presets' names of before come to exactly the values that they had. This file goes with these names, in 0.3."""

from __future__ import annotations

import pytest
from resolved_presets import resolved, stored

BEFORE = stored()


@pytest.mark.parametrize("name", BEFORE)
def test_a_name_of_before_has_its_values_to_the_last_one(name: str) -> None:
    assert resolved(name) == BEFORE[name]
