"""A real model through the project's own passes: sampling, trees, roles, and what is exported."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Bench, shake
from smol import smol, warmed

from flows import presets
from stages import evaluate
from stages.corpora import desk, scene
from stages.evaluate import EvaluateConfig
from stages.frame.sections import RolesConfig, TaskConfig
from stages.frame.types import Request
from stages.learn.adapter import base_of, new_adapter, save_adapter
from stages.llm.hf import HfEngine, merge_adapter, model_hash, read_base
from stages.llm.roles import load_roles
from stages.llm.tokens import ChatTokenizer, end_token
from stages.train.passes import pass_log_probs, step_passes
from stages.train.rows import TrainRow
from stages.train.warm import rows_of
from turnwise import cli

__all__ = ["smol", "warmed"]  # fixtures
pytestmark = pytest.mark.real


def rows(smol: Path, scenes: int) -> list[TrainRow]:
    chat, rng, roles = ChatTokenizer(str(smol)), random.Random(0), load_roles("service_desk")
    examples = [example for _ in range(scenes) for example in scene(desk, rng, roles, 3)]
    return rows_of(chat, examples, end_token(chat.tokenizer))


def test_the_engine_says_what_transformers_own_generate_says(smol: Path) -> None:
    """Greedily, in fp32: prompts of different lengths in one batch, against one generate each."""
    engine, (model, _) = HfEngine(str(smol)), read_base(str(smol), "float32")
    prompts = [tuple(row.prompt_ids) for row in rows(smol, 2)]
    found = engine.generate([Request(ids, 12, 0.0, 0) for ids in prompts])
    for ids, completion in zip(prompts, found, strict=True):
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
        assert list(completion.token_ids) == out[len(ids) :]


def test_a_tree_of_rows_is_what_separate_passes_are_in_values_and_gradients(smol: Path) -> None:
    """fp32, LoRA on every layer: log-probs of all learned tokens, and the gradient of each of the adapter's tensors."""
    base, _ = read_base(str(smol), "float32")
    model = shake(new_adapter(base, rank=4, alpha=8.0, seed=0), spread=0.02).train()
    found = rows(smol, 1)

    def gradients(log_probs: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        log_probs.sum().backward()  # type: ignore[no-untyped-call]
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    (one,) = step_passes({"": found}, 0, "cpu")
    assert len(one.tree.ids) < sum(len(row.ids) for row in found) * 0.75
    packed = pass_log_probs(model, one)
    packed_gradients = gradients(packed)
    alone = []
    for row in one.rows:
        logits = base_of(model)(torch.tensor([row.ids])).logits[0].log_softmax(1)
        alone += [logits[t - 1, row.ids[t]] for t in range(len(row.prompt_ids), len(row.ids))]
    apart = torch.stack(alone)
    assert torch.allclose(packed, apart, atol=2e-4)
    for name, gradient in gradients(apart).items():
        assert float((packed_gradients[name] - gradient).norm() / gradient.norm()) < 1e-4, name


def test_a_merged_export_answers_as_the_base_with_its_adapter(smol: Path, tmp_path: Path) -> None:
    """Merged weights are rounded to bfloat16 once, so logits differ by that and no more; the tie of the head stays."""
    base, _ = read_base(str(smol), "bfloat16")
    model: Any = shake(new_adapter(base, rank=4, alpha=8.0, seed=0), spread=0.1).eval()
    save_adapter(model, tmp_path / "adapter", model_hash(str(smol)))
    merge_adapter(str(smol), tmp_path / "adapter", tmp_path / "merged")
    merged, tokenizer = read_base(str(tmp_path / "merged"), "float32")
    ids = torch.tensor([rows(smol, 1)[0].prompt_ids])
    with torch.no_grad():
        expected, found = model.float()(ids).logits.softmax(-1), merged(ids).logits.softmax(-1)
        with model.disable_adapter():
            untouched = model(ids).logits.softmax(-1)
    assert float((found - expected).abs().max()) < 0.1 * float((untouched - expected).abs().max())
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_warmed_model_is_read_in_every_role(
    warmed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten episodes and ten questions to each role: at least eight of ten replies of each can be read."""
    status = cli.main(["doctor", "--task", "desk+smol", "--quiet"])
    said = capsys.readouterr().out
    assert status == 0 and said.startswith("data/models/smollm2_desk on desk+smol"), said
    assert "All roles can be read. Run it: turnwise run desk+smol" in said


def test_the_warmed_model_acts_readably_and_wins_no_more_than_chance(warmed: Path, tmp_path: Path) -> None:
    """96 visits where a random policy wins 1 in 24: 4 wins are expected, 13 come by chance once in 5,000 times."""
    bench = Bench(
        warmed,
        tmp_path,
        engine=HfEngine(str(warmed), dtype="bfloat16", batch=96),
        task=TaskConfig(),
        roles=RolesConfig(max_action_tokens=40),
    )
    metrics = bench.run(evaluate.STAGE, EvaluateConfig(episodes=96, audit_turns=0), {}).metrics
    assert metrics["evaluate/malformed_frac"] < 0.1
    assert metrics["evaluate/win_rate"] * 96 < 13


SMALL = ["collect.first_episodes=6", "evaluate.episodes=4", "evaluate.audit_turns=2", "iterations=1"]
OWN = {
    "nlac": ["targets.transitions=6", "critic.epochs=1", "critic.batch=6", "critic.policy_rows=2", "refine.states=6", "distill.epochs=1"],
    "rft": ["rft.epochs=1"],
    "grpo": ["grpo.epochs=1", "grpo.batch=12", "collect.group=2"],
    "sdpo": ["sdpo.epochs=1", "sdpo.batch=6"],
    "self_ac": ["self_ac.epochs=1", "self_ac.batch=6"],
    "sac": ["q_critic.transitions=6", "q_critic.epochs=1", "q_critic.batch=6", "pick.states=4", "distill.epochs=1"],
}  # fmt: skip


@pytest.mark.parametrize("method", OWN)
def test_an_iteration_of_each_method_runs_in_bfloat16_with_autocast(
    warmed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "+".join(["tiny", *([] if method == "nlac" else [method]), "smol"])
    run = presets.load(name)
    assert run.model.dtype == "bfloat16" and run.critic.autocast  # type: ignore[attr-defined]
    sets = [word for one in (*SMALL, *OWN[method], f"model.path={warmed}") for word in ("--set", one)]
    assert cli.main(["run", name, "--plain", "--quiet", "--home", str(tmp_path), *sets]) == 0
    assert "base" in capsys.readouterr().out
