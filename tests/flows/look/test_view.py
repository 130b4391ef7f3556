"""`turnwise view`: one file that asks nobody, in which what models wrote is data; episodes with all that was said of them;
what `turnwise show` lists of episodes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import viewing
from tokenizers import Tokenizer
from viewing import PLANTED, Viewed, data_of, turnwise

from flows.look.view.page import FILE, keep_page
from flows.look.view.sources import Source, choose
from flows.look.view.tokens import pieces_of
from flows.look.view.verdicts import disagreement
from flows.workspace import open_workspace
from stages.store.tracking import Tracking


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Viewed:
    return viewing.new_viewed(tmp_path_factory.mktemp("viewed"), empty_store)


def page(capsys: pytest.CaptureFixture[str], viewed: Viewed, *argv: str) -> str:
    """The page that the command wrote, in its default place."""
    status, out = turnwise(capsys, viewed, "view", *argv, "--json")
    assert status == 0, out
    file = Path(json.loads(out)["file"])
    assert file.parent == viewed.home / "data" / "views"
    return file.read_text(encoding="utf-8")


class Seen(HTMLParser):
    """Tags, what they refer to, and the scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.refers: list[str] = []
        self.policy = ""
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.refers += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "onerror")]
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and self.cdata_elem:
            self.scripts[-1] += data


def test_a_page_asks_nobody_and_lets_no_script_run_but_its_own(
    viewed: Viewed, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(capsys, viewed, viewed.runs["a"], viewed.runs["b"])
    seen = Seen(text)
    assert all(target.startswith("#") for target in seen.refers) and not {"img", "link", "iframe"} & set(seen.tags)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    data, script = seen.scripts
    assert "default-src 'none'" in seen.policy
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in seen.policy
    assert "<" not in data and "&" not in data
    assert data_of(text)["episodes"][0]["turns"][0]["observation"] == PLANTED
    assert PLANTED not in text


def test_a_turn_has_judgements_targets_and_its_tokens_beside_it(
    viewed: Viewed, capsys: pytest.CaptureFixture[str]
) -> None:
    data = data_of(page(capsys, viewed, viewed.runs["a"]))
    by_id = {one["id"]: one for one in data["episodes"]}
    assert {name: one["result"] for name, one in by_id.items()} == {
        "c0": "lost", "c1": "lost", "c2": "lost", "e1": "won", "e2": "lost",
    }  # fmt: skip
    (turn,) = by_id["c0"]["turns"]
    ((judgement,), (target,)) = turn["judgements"], turn["targets"]
    assert (judgement["by"], judgement["verdict"], judgement["taken"], judgement["wrong"]) == (
        "refine 0",
        "no",
        False,
        "",
    )
    assert judgement["refined"] == PLANTED
    assert (target["by"], target["role"], target["prompt"]) == ("refine 0", "policy", 3)
    assert (turn["trained"], turn["n_tokens"], turn["prompt"]) == (False, 3, 2)  # nlac learns the target, not the reply
    wrong = [[one["wrong"] for one in by_id[name]["turns"][0]["judgements"]] for name in ("e1", "e2")]
    assert wrong == [[""], ["yes_lost", ""]]


def test_a_turn_of_self_ac_has_its_value_its_credit_and_whether_it_was_trained_on(
    viewed: Viewed, capsys: pytest.CaptureFixture[str]
) -> None:
    data = data_of(page(capsys, viewed, viewing.make_self_ac(viewed.home)))
    turns = {one["id"]: one["turns"][0] for one in data["episodes"]}
    assert {name: turn["trained"] for name, turn in turns.items()} == {"c0": True, "c1": False, "e1": False}
    credit = turns["c0"]["credit"]
    assert credit["share"] == pytest.approx(0.3)
    assert {**credit, "share": 0} == {"value": 0.25, "target": 0.5, "advantage": -0.5, "share": 0, "clipped": False}
    assert turns["c0"]["differs"] == {"position": 5, "produced": ["a"], "rendered": [PLANTED]}
    assert turns["c1"]["credit"] is None
    assert [one["values"] for one in data["episodes"] if one["id"] == "e1"] == [[0.5, 0.75]]


def test_two_runs_are_told_apart_by_what_differs_and_have_their_curves_together(
    viewed: Viewed, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(capsys, viewed, viewed.runs["a"], viewed.runs["b"])
    table = text[text.index("What differs in config") : text.index('id="curves"')]
    assert re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>', table) == [
        ("critic.lr", "0.001", "0.0005")
    ]
    data = data_of(text)
    assert [one["title"] for one in data["curves"]] == ["win rate, validation"]  # no other has two points
    assert data["curves"][0]["runs"]["B"] == [[-1, 0.1, 0.0, 0.2], [0, 0.1, 0.0, 0.2]]
    evaluated = {(one["run"], one["id"]) for one in data["episodes"] if one["stage"] == "evaluate"}
    assert evaluated == {("A", "e1"), ("A", "e2"), ("B", "e1"), ("B", "e2")}


def test_a_part_of_the_episodes_is_said_to_be_one_and_is_spread_over_the_stage_runs(
    viewed: Viewed, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "some" / "page.html"
    argv = ("view", viewed.runs["a"][:12], "--episodes", "3", "--out", str(out))
    status, said = turnwise(capsys, viewed, *argv)
    assert status == 0 and "3 of 5 episodes" in said and "--episodes 5" in said and said.endswith(f"{out}\n")
    text = out.read_text(encoding="utf-8")
    assert "3 of 5 episodes" in text
    stages = [one["stage"] for one in data_of(text)["episodes"]]
    assert stages == ["collect", "collect", "evaluate"]
    assert data_of(text)["episodes"][0]["id"] == "c0"  # the one that refine judged
    assert "All 5 episodes" in page(capsys, viewed, viewed.runs["a"])


def test_two_runs_show_the_same_scenarios_whatever_was_judged() -> None:
    def heads(run: str) -> list[dict[str, Any]]:
        return [{"run_id": run, "episode_id": f"{run}{i}", "scenario_id": f"s{i}"} for i in range(50)]

    def chosen(run: str, told: set[str]) -> list[str]:
        return [head["scenario_id"] for head in choose(heads(run), [Source(run, "evaluate", 0)], told, 7)]

    assert chosen("a", {"a1", "a2"}) == chosen("b", set())


@pytest.mark.parametrize(
    ("verdict", "action", "info", "became", "kind"),
    [
        ("yes", "look", {"own": True}, "lost", "yes_lost"),
        ("no", "look", {"own": True}, "won", "no_won"),
        ("yes", "look", {"own": True}, "won", ""),
        ("yes", "look", {"own": False}, "lost", ""),  # the base's action, whose return nobody knows
        ("yes", "look", {"own": True}, "failed", ""),
        ("malformed", "look", {"own": True}, "lost", ""),
        ("yes", "Thought: t\nAction: look", {"dropped": ""}, "lost", "yes_lost"),
        ("yes", "Thought: t\nAction: leap", {"dropped": ""}, "lost", ""),
    ],
)
def test_critic_and_outcome_disagree_on_the_action_that_was_taken_alone(
    verdict: str, action: str, info: dict[str, Any], became: str, kind: str
) -> None:
    assert disagreement({"verdict": verdict, "action": action, "info": info}, "look", became) == kind


def test_pieces_of_tokens_are_the_text(tmp_path: Path) -> None:
    base = Path(__file__).parents[3] / "data" / "base"
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    ids = tokenizer.encode("Thought: refund may need check photo. Action: check photo").ids
    pieces = pieces_of(str(base))
    assert pieces is not None and len(pieces(ids)) == len(ids)
    assert "".join(pieces(ids)) == tokenizer.decode(ids)
    (tmp_path / "tokenizer.json").write_text("{")
    assert pieces_of(str(tmp_path)) is None
    assert pieces_of(str(tmp_path / "nowhere")) is None


def test_what_cannot_be_viewed_is_one_sentence(
    viewed: Viewed, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = viewed.runs
    wrong = {
        (runs["a/collect"],): f"a run of collect. Its pipeline run: turnwise view {runs['a'][:8]}",
        (runs["a"], runs["a"][:10]): "twice. Leave the second one out.",
        (runs["a"], "--episodes", "-1"): "--episodes -1: wanted 0 or more.",
        (runs["a"], "--out", str(tmp_path)): "cannot be written (Is a directory). Name another file.",
    }
    for argv, told in wrong.items():
        status, said = turnwise(capsys, viewed, "view", *argv)
        assert (status, said.count("\n")) == (2, 1) and told in said
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*"))


def test_a_run_keeps_its_page_and_does_not_fail_with_it(viewed: Viewed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(viewed.home)
    workspace, told = open_workspace(viewed.home), list[str]()
    keep_page(workspace, viewed.runs["b"], told.append)
    assert told == []
    assert len(data_of(workspace.tracking.artifact(viewed.runs["b"], FILE).read_text())["episodes"]) == 5

    class Broken(Tracking):
        def write_text(self, run_id: str, artifact_path: str, text: str) -> None:
            raise OSError("no room")

    keep_page(replace(workspace, tracking=Broken(viewed.home / "mlflow")), viewed.runs["a"], told.append)
    assert told == [f"view.html was not written (OSError: no room). Run: turnwise view {viewed.runs['a'][:8]}"]


def test_show_lists_episodes_by_outcome_and_by_what_the_critic_got_wrong(
    viewed: Viewed, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(*argv: str) -> str:
        status, said = turnwise(capsys, viewed, "show", *argv)
        assert status == 0, said
        return said

    evaluated, collected = viewed.runs["a/evaluate"], viewed.runs["a/collect"]
    assert "episodes: 2, by reward" in show(evaluated)
    won = show(evaluated, "--outcome", "won")
    assert "episodes: 1 of 2 fit" in won and "e1" in won and "\n  e2" not in won
    wrong = show(evaluated, "--disagree")
    assert "episodes: 1 of 2 fit" in wrong and "turn 0: said Yes, and the episode was lost" in wrong
    assert json.loads(show(evaluated, "--disagree", "--json"))["episodes"][0]["disagree"] == {"0": "yes_lost"}
    part = show(collected, "--episodes", "2")
    assert "episodes: 3; listed are the 2 with the lowest and the highest rewards. All of them: --episodes 3" in part
    assert len(re.findall(r"^  c\d", part, re.MULTILINE)) == 2
    assert "episodes: 0 of 3 fit" in show(collected, "--outcome", "failed")
    status, said = turnwise(capsys, viewed, "show", viewed.runs["a"], "--outcome", "won")
    assert (
        status == 2
        and "--outcome: wanted a run of collect or evaluate, which has episodes, found a run of pipeline" in said
    )


@pytest.mark.slow
@pytest.mark.skipif(viewing.CHROMIUM is None, reason="there is no Chromium or Chrome to look with")
def test_in_a_browser_the_address_filters_names_an_episode_and_planted_scripts_stay_text(
    viewed: Viewed, capsys: pytest.CaptureFixture[str]
) -> None:
    page(capsys, viewed, viewed.runs["a"], viewed.runs["b"])
    (file,) = (viewed.home / "data" / "views").glob("*-*.html")
    shown = viewing.browse(file, "#critic=wrong&run=A")
    assert "1 of 10 episodes, 0 of them won" in shown
    assert "Critic and outcome disagree: it said Yes, and the episode was lost." in shown
    assert len(re.findall(r"<article", shown)) == 2  # the same scenario of the other run, beside it
    assert shown.count('role="option"') == 1
    named = viewing.browse(file, "#episode=c0/B&beside=none&tokens=1")
    assert 'aria-label="Episode c0"' in named and len(re.findall(r"<article", named)) == 1
    assert "3 tokens of the reply not trained on; 2 of the prompt not trained on" in named
    assert "&lt;/script&gt;&lt;script&gt;document.title" in named
    assert "<title>taken over" not in named + shown and "<img" not in named + shown
    assert "<svg" in named
    assert "Episode nobody is not on this page" in viewing.browse(file, "#episode=nobody")
    assert os.path.getsize(file) > 10_000
