"""A key of the environment is sent to the endpoint, and stands in nothing that a run leaves or prints."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from openai_stub import Answer, Stub

from turnwise import cli

pytest.importorskip("openai", reason="the extra `openai` is not installed")
pytestmark = pytest.mark.slow

KEYS = {
    name: f"s3cret-{number}-of-the-environment"
    for number, name in enumerate(("OPENAI_API_KEY", "HF_TOKEN", "PREFECT_API_KEY", "MLFLOW_TRACKING_PASSWORD"))
}
ASKED = (
    "run", "tiny", "--plain", "--set", "iterations=0", "--set", "model.engine=openai", "--set", "evaluate.probe_path=", "--set", "evaluate.episodes=2",
)  # fmt: skip


@pytest.fixture
def stub(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    return stub


def test_no_key_of_the_environment_is_written_or_printed(
    fresh: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreadable(path: str, body: dict[str, Any]) -> Answer:
        choice = {"text": "", "finish_reason": "length", "token_ids": [3], "logprobs": {"token_logprobs": [-1.0]}}
        return 200, {"choices": [choice]}

    def echo(path: str, body: dict[str, Any]) -> Answer:
        return 400, {"error": {"message": f"{stub.asked[-1][2]} is no key of ours"}}

    statuses = []
    with contextlib.chdir(fresh):
        for seed, answer in enumerate((unreadable, echo)):
            stub.answer = answer
            statuses.append(cli.main([*ASKED, "--set", f"model.url={stub.url}", "--set", f"seed={seed}"]))
        assert cli.main(["runs"]) == 0
    assert statuses == [0, 1]
    assert {sent for _, _, sent in stub.asked} == {f"Bearer {KEYS['OPENAI_API_KEY']}"}
    told = "".join(capsys.readouterr())
    left = {path: path.read_bytes() for path in fresh.rglob("*") if path.is_file()}
    assert "OPENAI_API_KEY" in told or "is no key of ours" in told
    assert any(b"is no key of ours" in content for content in left.values())  # the failed run's error
    for key in KEYS.values():
        assert key not in told
        assert not [path for path, content in left.items() if key.encode() in content]
