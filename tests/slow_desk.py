"""The desk with customers who take their time: an environment of one's own, for a project folder."""

from __future__ import annotations

import textwrap
from pathlib import Path

SETS = ("task.env=shop.slow", "model.engine=scripted", "roles.max_action_tokens=400")


def open_shop(home: Path, seconds: float) -> None:
    """Write the module `shop.slow` into the project folder. seconds: of a step."""
    text = f'''
    """A desk whose customers take their time."""
    import time

    from stages.envs.service_desk import OPTIONS, ServiceDesk, make as plain, scenarios

    def make(options, ask):
        def slow():
            desk = plain(options, ask)()
            step = desk.step
            desk.step = lambda message: (time.sleep({seconds}), step(message))[1]
            return desk
        return slow
    '''
    (home / "shop").mkdir(parents=True, exist_ok=True)
    (home / "shop" / "slow.py").write_text(textwrap.dedent(text).lstrip())
