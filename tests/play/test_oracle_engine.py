"""The model inside an environment: whose engine it is, how a wrong address is told, and that its tokens reach no
training row.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
from openai_stub import Stub

from flows import presets
from stages.frame.contract import Config
from stages.frame.sections import ModelConfig, RolesConfig, TaskConfig
from stages.frame.types import EngineUnavailable, UsageError
from stages.llm.openai import chat
from stages.llm.roles import Roles
from stages.play.environment import environment
from stages.play.rollout import RolloutSettings, rollout

ROLES = Roles("toy", {"policy": ""})
SETTINGS = RolloutSettings(
    "mine", temperature=1.0, max_tokens=100, max_turns=4, malformed_allowance=1, slots=8, attempts=3, seed=5
)


def test_an_oracle_on_the_run_s_engine_answers_as_the_base_and_leaves_no_row(base: Path, tmp_path: Path) -> None:
    engine = models.Recorder(
        lambda prompt, request: "Yes" if "You are the oracle" in prompt else "Thought: . Action: Is it alive?"
    )
    engine.load_adapter("mine", Path("x"))
    bench = models.Bench(
        base,
        tmp_path,
        engine=engine,
        task=TaskConfig(env="twenty_questions", options={"questions": 3}, oracle="engine", max_turns=5),
    )
    make = environment(bench.context(Config(), {}))
    scenarios = models.scenarios_of("twenty_questions", 2)
    episodes = rollout(engine, make, scenarios, ROLES, SETTINGS)
    asked = [r for r in engine.requests if r.adapter is None]
    assert len(asked) == 2  # the same question of each object: asked once, then remembered
    recorded = {t.prompt_ids for e in episodes for t in e.turns}
    assert recorded.isdisjoint(r.prompt_ids for r in asked)
    assert all(t.observation.startswith("Yes.") for e in episodes for t in e.turns)


@pytest.mark.parametrize(
    ("oracle_url", "url", "key"),
    [("localhost:8001", "http://127.0.0.1:1/v1", "task.oracle_url"), ("", "localhost:8000", "model.url")],
)
def test_an_oracle_s_wrong_address_is_told_by_the_key_that_holds_it(oracle_url: str, url: str, key: str) -> None:
    with pytest.raises(UsageError, match=rf"^{re.escape(key)}: wanted a base URL"):
        presets.load("twenty_questions", ["task.oracle=openai", f"task.oracle_url={oracle_url}", f"model.url={url}"])


def test_an_oracle_without_any_address_is_told_by_the_key_to_set() -> None:
    task = TaskConfig(env="twenty_questions", options={"questions": 3}, oracle="openai")
    with pytest.raises(UsageError, match=r"^task\.oracle_url: wanted a base URL"):
        environment(SimpleNamespace(run=SimpleNamespace(task=task, roles=RolesConfig(), model=ModelConfig())))  # type: ignore[arg-type]


def test_an_oracle_that_is_down_is_told_by_its_own_key() -> None:
    ask = chat("http://127.0.0.1:1/v1", "oracle", retries=0, timeout_s=1, key="task.oracle_url")
    with pytest.raises(EngineUnavailable, match=r"Is the server up, and is task.oracle_url right\?"):
        ask([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(("own", "asked"), [({}, "policy"), ({"oracle_model": "oracle"}, "oracle")])
def test_an_oracle_may_have_an_endpoint_and_a_model_of_its_own(
    own: dict[str, str], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    stub = Stub()
    stub.answer = lambda path, body: (200, {"choices": [{"message": {"role": "assistant", "content": "Yes"}}]})
    urls = {"oracle_url": stub.url} if own else {}
    task = TaskConfig(env="twenty_questions", options={"questions": 3}, oracle="openai", **urls, **own)
    model = ModelConfig(path="policy", url="http://127.0.0.1:1/v1" if own else stub.url)
    env = environment(SimpleNamespace(run=SimpleNamespace(task=task, roles=RolesConfig(), model=model)))()  # type: ignore[arg-type]
    env.reset(models.scenarios_of("twenty_questions", 1)[0])
    assert str(env.step({"role": "assistant", "content": "Action: Is it alive?"}).messages[0]["content"]).startswith(
        "Yes."
    )
    assert [body["model"] for _, body, _ in stub.asked] == [asked]
    stub.server.shutdown()
    stub.server.server_close()
