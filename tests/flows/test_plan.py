"""`turnwise plan`: shapes that are published, counts by hand, work and memory against what a step of a model really
does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checks.plan_check import saved_bytes
from benchmarks.counts import attention_flops, causal_pairs, matmul_flops
from benchmarks.passes import RANK, backward, grpo_loss, grpo_row, made_up, random_policy, with_log_probs
from flows import presets
from flows.cost.estimate import estimate, train_flops
from flows.cost.lengths import assumed
from flows.cost.machine import Machine
from flows.cost.shapes import DEVICES, KNOWN, read_shape, shape_of
from flows.cost.work import Rows
from flows.cost.workload import OF_STAGE, workload
from flows.registry import METHODS
from stages.frame.types import UsageError
from stages.learn.adapter import base_of
from turnwise import cli
from turnwise.commands.plan import lines

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_shapes_have_as_many_parameters_as_the_models() -> None:
    assert KNOWN["Qwen/Qwen2.5-7B-Instruct"].parameters == 7_615_616_512
    assert KNOWN["Qwen/QwQ-32B"].parameters == 32_763_876_352
    assert KNOWN["Qwen/Qwen2.5-0.5B-Instruct"].parameters == 494_032_768
    # By benchmarks/speed/inference_cost.py, from the modules themselves.
    assert KNOWN["Qwen/Qwen2.5-7B-Instruct"].lora(32) == 80_740_352
    assert (shape_of("data/base").parameters, shape_of("data/base").lora(32)) == (662_528, 245_760)


def test_a_model_that_is_not_known_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config.json in 'some/model' .* Qwen/Qwen2.5-7B-Instruct"):
        shape_of("some/model")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2, "hidden_size": 8}))
    with pytest.raises(UsageError, match="has no 'num_hidden_layers'"):
        shape_of(str(tmp_path))
    assert shape_of(str(tmp_path / "QwQ-32B")) == KNOWN["Qwen/QwQ-32B"]  # a folder that is still to come


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_can_be_planned(name: str) -> None:
    run = presets.load(name)
    found = estimate(run, "h100", 2)
    assert {one["stage"] for one in found["stages"]} == {"evaluate", *METHODS[found["method"]]}
    # A stage without passes, like the frozen critic of an ablation, costs nothing.
    assert all(
        (one["hours"] > 0) == (one["pflop"] > 0) == (one["prompts"] + one["trained"] > 0) for one in found["stages"]
    )
    assert any("fits" in line or "does not fit" in line for line in found["verdict"])
    said = lines(found)[3 : 5 + len(found["stages"])]
    head, *table = [line[: said[0].index("known")].split() for line in said]
    assert [row[0] for row in table] == [*(one["stage"] for one in found["stages"]), "all"]
    assert {len(row) for row in table} == {len(head)}  # no two columns run together


def test_every_stage_of_a_method_has_its_work() -> None:
    assert {stage for chain in METHODS.values() for stage in chain} | {"evaluate"} == set(OF_STAGE)


def test_counts_of_a_run_are_those_by_hand() -> None:
    """2 iterations of 16 episodes with 3 turns; 32 transitions of 48, then of 96, a third of them terminal; 32 states."""
    run = presets.load("tiny")
    size = assumed(
        run,
        [
            "turns=3",
            "action=10",
            "act=4",
            "system=20",
            "first=5",
            "observation=8",
            "template=30",
            "future=24",
            "yes=0.25",
        ],
    )
    works = workload(run, size)
    assert [work.stage for work in works] == [
        "evaluate",
        "evaluate",
        *(["collect", "targets", "critic", "refine", "distill", "evaluate"] * 2),
        "evaluate",
    ]
    collect, targets, critic, refine, distill, _ = works[2:8]
    assert (collect.episodes, collect.prompts[0].n, collect.generated) == (16, 48, 480)
    assert collect.read == 16 * sum(25 + k * 18 for k in range(3))
    # Two thirds are bootstrapped: a' and f'. All are combined and corrected.
    open_ends = 32 * 2 / 3
    assert targets.prompts[0].n == pytest.approx(2 * open_ends + 2 * 32)
    assert targets.generated == pytest.approx(open_ends * (10 + 24) + 32 * (24 + 24))
    assert critic.steps == 1  # 32 targets in batches of 48
    assert critic.predicted == 32 * 24 + 16 * 10
    # 24 actions are rewritten, 8 kept.
    assert refine.prompts[0].n == 3 * 32 + 2 * 24
    assert distill.steps == 1 and distill.predicted == 32 * 10 + 16 * 24  # one epoch: none are held out
    several = [work for work in workload(presets.load("tiny", ["distill.epochs=2"]), size) if work.stage == "distill"]
    assert several[0].predicted == 2 * 29 * 10 + 2 * 16 * 24  # 3 of 32 are
    assert works[8].prompts[0].n == 48


def test_general_rows_are_counted_and_that_they_are_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 iterations of 512 steps with 2 rows of 300 tokens each, half of them replies."""
    monkeypatch.chdir(tmp_path)
    none = ["critic.general_rows=0", "distill.general_rows=0"]
    found, bare = (estimate(presets.load("math+qwen7b", sets), "h100", 1, ["general=300"]) for sets in ([], none))
    more = [
        sum(one[name] for one in found["stages"]) - sum(one[name] for one in bare["stages"])
        for name in ("trained", "predicted")
    ]
    assert more == pytest.approx([60 * 512 * 2 * 300, 60 * 512 * 2 * 150])
    missing = [line for line in found["verdict"] if "general_path" in line]
    assert [line.partition(":")[0] for line in missing] == ["critic.general_path", "distill.general_path"]
    assert not any("general_path" in line for line in bare["verdict"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "general.jsonl").touch()
    assert not any("general_path" in line for line in estimate(presets.load("math+qwen7b"), "h100", 1)["verdict"])


def test_grpo_is_planned_in_passes_and_its_adapter_in_16_bits() -> None:
    """128 episodes of 13 turns in groups of 4, of which 1 - .3^4 - .7^4 are mixed; steps of 128 turns."""
    stage = ["method=grpo", "grpo.batch=128", "grpo.epochs=1"]
    run = presets.load("tau_retail+grpo+qwen7b", stage)
    last = [work for work in workload(run, assumed(run, ["turns=13", "win=0.3"])) if work.stage == "grpo"][-1]
    assert last.trained[0].n == pytest.approx(128 * 13 * (1 - 0.3**4 - 0.7**4), abs=1)
    assert last.steps == 10
    found = {
        (passes, on): estimate(
            presets.load("tau_retail+grpo+qwen7b", [*stage, f"grpo.pass_tokens={passes}", f"grpo.autocast={on}"]),
            "h100",
            1,
        )
        for passes, on in ((16384, "true"), (0, "true"), (16384, "false"))
    }
    whole, planned, exact = found[0, "true"], found[16384, "true"], found[16384, "false"]
    assert (
        "fits" in planned["verdict"][0]
        and "does not fit: grpo" in whole["verdict"][0]
        and "grpo.pass_tokens" in whole["verdict"][0]
    )
    hours = [next(one["hours"] for one in each["stages"] if one["stage"] == "grpo") for each in (planned, whole, exact)]
    assert hours[1] < hours[0] < 0.9 * hours[2]  # every pass reads the system message, which a whole step reads once
    assert planned["memory_gib"]["grpo"]["activations"] < 0.9 * exact["memory_gib"]["grpo"]["activations"]


def test_what_was_read_before_is_the_system_message_or_all_until_the_turn_before() -> None:
    told = ["turns=6", "system=300", "first=10", "action=12", "observation=20", "act=5", "template=30", "future=9"]
    sets = ["refine.futures=4", "refine.correct=false", "roles.history=chat", "roles.max_thought_tokens=0"]
    for draw, before in (
        ("turn", 300.0),
        ("episode", 310 + 1.5 * 32),
    ):  # of the middle turn, the state is 310 + 2.5 * 32
        run = presets.load("tau_retail+qwen7b", [*sets, f"refine.draw={draw}"])
        refine = next(w for w in workload(run, assumed(run, [*told, "yes=1"])) if w.stage == "refine")
        again = 3 * (310 + 2.5 * 32 + 30 + 5)  # three more futures of each prompt
        assert refine.cached == pytest.approx(refine.prompts[0].n / 6 * (3 * before + again))


def test_chains_of_real_steps_are_merged_step_by_step() -> None:
    size = assumed(presets.load("demo"), ["turns=3"])
    by_steps = {
        n: next(w for w in workload(presets.load("demo", [f"targets.steps={n}"]), size) if w.stage == "targets")
        for n in (1, 3)
    }
    # 320 transitions, half of them terminal, a quarter each of the first and the second turn: a' and f' of half, 2
    # replies of each at depth 1.
    assert by_steps[1].prompts[0].n == pytest.approx(2 * 160 + 2 * 320)
    # to the end of the visit: nothing is bootstrapped
    assert by_steps[3].prompts[0].n == pytest.approx(2 * (160 + 80 * 2 + 80 * 3))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_work_of_a_training_step_is_what_torch_counts(checkpointing: bool) -> None:
    """But for two details. No gradient goes into the embeddings, so the first layer's queries, keys and values send
    none back to what they read; with checkpointing transformers has it go there, but the last product of each layer, of
    the adapter, is not needed again.
    """
    model = random_policy(64, 4, 512, 300)
    if checkpointing:
        base_of(model).gradient_checkpointing_enable({"use_reentrant": False})
    row = grpo_row(with_log_probs(model, made_up(4, 4, 70, 20, 20, 300)))  # more than one chunk of action tokens
    counted = matmul_flops(backward(lambda: grpo_loss(model, row), model))
    m, length = machine(model, checkpointing), row.ids.shape[1]
    said = sum(train_flops(m, Rows(4, length, len(row.target_ids) / 4), autocast=False))
    attention = m.shape.attention_flops(causal_pairs([length] * 4), 9 if checkpointing else 7)
    if not checkpointing:
        assert attention == attention_flops(causal_pairs([length] * 4), 64, 4)
    not_done = 4 * 64 * RANK if checkpointing else 64 * (m.shape.q + 2 * m.shape.kv) + 3 * 64 * RANK
    assert said - attention - 2 * row.ids.numel() * not_done == pytest.approx(counted, rel=1e-3)


def machine(model: Any, checkpointing: bool) -> Machine:
    run = presets.load("demo", [f"model.gradient_checkpointing={str(checkpointing).lower()}"])
    return Machine(run, read_shape(base_of(model).config.to_dict(), "config"), DEVICES["h100"], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_autograd_keeps(dtype: torch.dtype) -> None:
    """Within 10 %: positions, log-sums of the attention and indices are left out."""
    model = random_policy(128, 4, 256, 300)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    ids = torch.randint(300, (2, 100))
    counted = saved_bytes(lambda: base_of(model).model(input_ids=ids, use_cache=False).last_hidden_state, model)
    kept, again = machine(model, False).shape.activation_bytes(dtype.itemsize, RANK, checkpointing=False)
    assert again == 0
    assert kept * ids.numel() == pytest.approx(counted, rel=0.10)


def test_a_run_that_does_not_fit_is_told_what_to_change() -> None:
    run = presets.load("twenty_questions")
    told = estimate(run, "rtx4090", 1)["verdict"]
    assert (
        "does not fit" in told[0] and "model.gradient_checkpointing=true" in told[0] and "critic.pass_tokens" in told[0]
    )
    changed = ["model.gradient_checkpointing=true", "critic.pass_tokens=4096", "distill.pass_tokens=4096"]
    assert estimate(presets.load("twenty_questions", changed), "h100", 1)["verdict"][0].startswith("fits")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "h1000"], "no device 'h1000'; did you mean 'h100'? Known: "),
        (["--devices", "0"], "--devices 0: wanted at least 1"),
        (["--assume", "turn=3"], "names: turns, system"),
        (["--assume", "turns=many"], "--assume turns=many: wanted NAME=NUMBER"),
        (["--assume", "turns=1e308"], "of turns a number from 1 to 8 (task.max_turns)"),
        (["--assume", "turns=0"], "of turns a number from 1"),
        (["--assume", "turns=1e-300"], "of turns a number from 1"),
        (["--assume", "turns=nan"], "of turns a number from 1"),
        (["--assume", "yes=1.5"], "of yes a number from 0 to 1."),
        (["--assume", "train_trees=1.5"], "of train_trees a number from 1e-09 to 1."),
        (["--assume", "requests=-1"], "of requests a number from 1e-09 to 100000."),
        (["--assume", "cache_bytes=0"], "of cache_bytes a number from 0.5 to 8."),
        (["--assume", "action=1e308"], "of action a number from 0 to 1e+07."),
        (["--devices", "1" + "0" * 400], "wanted at least 1, and at most 100000"),
        (["--set", "critic.lrr=1"], "did you mean 'lr'"),
    ],
)
def test_a_wrong_word_is_one_sentence(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "demo", *words]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_the_command_prints_every_stage_and_as_json_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "demo", "--assume", "turns=3"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["plan", "demo", "--assume", "turns=3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["assumed"]["turns"] == 3
    for one in found["stages"]:
        assert f"{one['stage']:<9}{one['runs']:>5}" in text


@pytest.mark.parametrize(
    "content", [b"{", b"\xff", b"[]", b'{"num_attention_heads": "many"}', b'{"num_attention_heads": 0}']
)
def test_a_damaged_config_of_a_model_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"^model\.path: .*config\.json"):
        shape_of(str(tmp_path))
