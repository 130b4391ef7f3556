"""The vLLM engine: what holds without vLLM, and whole iterations through a real one (`make test-vllm`) against
transformers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import stage_runs
from engines import BASE, HAS_VLLM, Subject
from models import Bench

from flows import presets, workspace
from stages.frame.contract import Config
from stages.frame.signals import signals_held
from stages.frame.types import Engine, EngineUnavailable, Request, Sleeper, UsageError
from stages.llm import vllm as module
from stages.llm.metered import Metered
from stages.llm.scripted import ScriptedEngine
from stages.llm.streams import once
from stages.llm.vllm import VllmEngine, start
from stages.store.replay import Replay
from stages.train.model import trainable
from turnwise import cli


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed here")
def test_without_vllm_the_engine_says_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"needs the package vllm. Run: pip install 'turnwise\[vllm\]'"):
        VllmEngine(str(BASE))


def test_a_folder_that_is_not_there_is_no_hub_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^model.path: there is no folder"):
        VllmEngine(str(tmp_path / "none"))


def test_a_rank_beyond_its_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        LLM = None

    monkeypatch.setitem(sys.modules, "vllm", Package)
    with pytest.raises(UsageError, match=r"^model.lora_rank: vLLM takes adapters up to rank 512, found 513"):
        start("base", dtype="float32", lora_rank=513, gpu_memory=0.5)


def test_the_config_chooses_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, dict[str, Any]]] = []

    class Noted:
        def __init__(self, path: str, **settings: Any) -> None:
            made.append((path, settings))

    monkeypatch.setattr(module, "VllmEngine", Noted)
    run = presets.load(
        "tiny",
        ["model.engine=vllm", "model.path=m", "model.lora_rank=8", "model.gpu_memory=0.4", "model.dtype=bfloat16"],
    )
    workspace.make_engine(run)
    assert made == [("m", {"dtype": "bfloat16", "lora_rank": 8, "gpu_memory": 0.4})]


def test_weights_and_not_the_engine_s_name_are_in_the_fingerprint() -> None:
    by_engine = {
        engine: workspace.model_hash(presets.load("tiny", [f"model.engine={engine}", f"model.path={BASE}"]))
        for engine in ("hf", "vllm")
    }
    assert by_engine["hf"] == by_engine["vllm"]


def test_the_engine_sleeps_before_a_model_is_opened_for_training(base: Path, tmp_path: Path) -> None:
    """It does so through the meter that `execute` puts around it; an engine that cannot sleep is left alone."""

    class Sleepy(ScriptedEngine):
        naps = 0

        def sleep(self) -> None:
            self.naps += 1

    engine = Sleepy()
    for given in (engine, Metered(engine), Metered(ScriptedEngine())):
        trainable(Bench(base, tmp_path, engine=given).context(Config(), {}), None)
    assert engine.naps == 2
    assert not isinstance(ScriptedEngine(), Sleeper)


class FakeCore:
    """vLLM's engine, as far as `generate` drives it: a step ends every request, or raises."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.aborted: list[str] = []
        self.fails = False

    def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any = None) -> None:
        if prompt["prompt_token_ids"] == [13]:
            raise ValueError("no such prompt\nand more")
        self.waiting.append(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        self.waiting = [name for name in self.waiting if name not in names]

    def step(self) -> list[Any]:
        if self.fails:
            raise RuntimeError("device lost\nand more")
        done, self.waiting = self.waiting, []
        log_probs = SimpleNamespace(token_ids=[7, 1], logprobs=[-0.5, -0.25])
        output = SimpleNamespace(token_ids=[7, 1], logprobs=log_probs, finish_reason="stop")
        return [SimpleNamespace(request_id=n, outputs=[output], num_cached_tokens=3) for n in done]


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> tuple[VllmEngine, FakeCore]:
    core = FakeCore()
    llm = SimpleNamespace(llm_engine=core, model_config=SimpleNamespace(max_model_len=256))
    monkeypatch.setattr(module, "start", lambda *given, **settings: llm)
    monkeypatch.setattr(VllmEngine, "_sampling", lambda self, request: None)
    return VllmEngine(str(BASE)), core


def test_a_step_that_fails_is_the_engine_s_end(faked: tuple[VllmEngine, FakeCore]) -> None:
    """What it left half done stays in vLLM's cache: seen to come back as tokens of the wrong probability."""
    engine, core = faked
    (done,) = engine.generate([Request((5,), 8, 1.0, 0)])
    assert (done.token_ids, done.cached) == ((7, 1), 3)
    core.fails = True
    with pytest.raises(
        EngineUnavailable, match=r"^vLLM failed in the middle of a step \(device lost\) and cannot go on"
    ):
        engine.generate([Request((5,), 8, 1.0, 0)])
    core.fails = False
    with pytest.raises(
        EngineUnavailable, match=r"^vLLM failed in the middle of a step \(device lost\) and cannot go on"
    ):
        engine.generate([Request((5,), 8, 1.0, 0)])


def test_a_request_that_vllm_refuses_takes_the_others_back(faked: tuple[VllmEngine, FakeCore]) -> None:
    engine, core = faked
    with pytest.raises(UsageError, match=r"^vLLM refuses a request \(no such prompt\)$"):
        engine.generate([Request((5,), 8, 1.0, 0), Request((13,), 8, 1.0, 0)])
    assert not core.waiting and len(core.aborted) == 2
    assert engine.generate([Request((5,), 8, 1.0, 0)])[0].log_probs == (-0.5, -0.25)


def test_no_request_wakes_no_sleeping_engine(faked: tuple[VllmEngine, FakeCore]) -> None:
    engine, _ = faked
    engine._asleep = True
    assert engine.generate([]) == []
    assert engine._asleep


def test_the_engine_does_not_sleep_in_the_middle_of_a_stream(faked: tuple[VllmEngine, FakeCore]) -> None:
    engine, core = faked
    core.waiting.append("of a stream around")
    with pytest.raises(RuntimeError, match="cannot sleep while requests are under way"):
        engine.sleep()
    core.waiting.clear()
    engine.sleep()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    # ignored where the tests themselves run in the background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("asked_between", [True, False])
def test_a_signal_waits_for_the_end_of_a_step(asked_between: bool) -> None:
    """And is not lost where it came in the last one."""
    done = []

    def steps() -> None:
        with signals_held() as deliver:
            deliver()
            os.kill(os.getpid(), signal.SIGINT)
            done.append("the rest of the step")
            if asked_between:
                deliver()
                done.append("another step")

    with pytest.raises(KeyboardInterrupt):
        steps()
    assert done == ["the rest of the step"]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("nested", [False, True])
def test_a_signal_does_not_wait_for_what_acts_on_a_reply(faked: tuple[VllmEngine, FakeCore], nested: bool) -> None:
    """An environment may take long, or ask the same engine over and over."""
    engine, core = faked
    done = []

    def act() -> None:
        with closing(engine.stream(once([Request((5,), 8, 1.0, 0)]))) as replies:
            for _ in replies:
                os.kill(os.getpid(), signal.SIGINT)
                if nested:
                    engine.generate([Request((5,), 8, 1.0, 0)])
                done.append("the rest of the act")

    with pytest.raises(KeyboardInterrupt):
        act()
    assert not done and not core.waiting


@pytest.fixture
def turnwise(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch, engine_of: Callable[[str], Subject]
) -> Callable[..., Any]:
    """(engine, command) -> (its folder, its summary), in a project folder of its own with the base that ships."""
    from commands import make_home

    real = workspace.make_engine

    def make_engine(run: Any) -> Engine:
        return (
            real(run)
            if run.model.engine == "hf"
            else engine_of("server" if run.model.engine == "openai" else "vllm").engine
        )

    monkeypatch.setattr(workspace, "make_engine", make_engine)

    def turnwise(engine: str, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[Path, dict[str, Any]]:
        home = make_home(tmp_path / engine, empty_store, BASE)
        monkeypatch.chdir(home)
        capsys.readouterr()
        assert (
            cli.main(
                (
                    "run",
                    *argv,
                    "--plain",
                    "--quiet",
                    "--json",
                    "--set",
                    f"model.engine={engine}",
                    "--set",
                    "iterations=1",
                )
            )
            == 0
        )
        return home, json.loads(capsys.readouterr().out.strip().splitlines()[-1])

    return turnwise


def sets(**values: Any) -> list[str]:
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed here; run: make test-vllm")
def test_a_greedy_iteration_of_nlac_is_that_of_transformers(
    turnwise: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """In process and through a server: every id that was generated or trained on, adapters trained in between included.
    None of these replies is a tie of two tokens.
    """
    greedy = sets(
        roles__policy_temperature=0, roles__target_temperature=0, roles__future_temperature=0, evaluate__temperature=0, collect__first_episodes=12,
        evaluate__episodes=8,
    )  # fmt: skip
    seen = {}
    for engine in ("hf", "vllm", "openai"):
        home, summary = turnwise(engine, capsys, "tiny", *greedy)
        replay = Replay(home / "data" / "turnwise.duckdb")
        seen[engine] = {
            title: {table: replay.rows(table, [run]) for table in ("turns", "targets")}
            for title, run in stage_runs(summary).items()
        }
    expected = seen.pop("hf")
    for engine, found in seen.items():
        assert expected.keys() == found.keys()
        counted = 0
        for title, tables in expected.items():
            for table, keys in (
                ("turns", ("prompt_ids", "action_ids", "reward")),
                ("targets", ("student_ids", "completion_ids", "weight")),
            ):
                for one, other in zip(tables[table], found[title][table], strict=True):
                    assert [one[key] for key in keys] == [other[key] for key in keys], (engine, title)
                    counted += 1
                    if table == "turns":
                        assert other["log_probs"] == pytest.approx(one["log_probs"], abs=1e-3), (engine, title)
        assert counted > 100


@pytest.mark.slow
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed here; run: make test-vllm")
def test_an_iteration_of_self_ac_starts_from_the_log_probs_of_the_trainer(
    turnwise: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its draws are vLLM's own: what must agree is that each token's ratio is 1 before the first step."""
    small = sets(evaluate_every=1, collect__first_episodes=16, self_ac__epochs=1, evaluate__episodes=8)
    for engine in ("hf", "vllm"):
        _, summary = turnwise(engine, capsys, "desk+self_ac", *small)
        metrics = summary["iterations"][1]["metrics"]
        assert 0 < metrics["self_ac/gap_mean_first"] <= metrics["self_ac/gap_max_first"] < 1e-4
        assert summary["status"] == "FINISHED"
