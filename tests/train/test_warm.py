"""A real model is warmed for the roles: through its own template, and without any task's answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file

from stages import pretrain
from stages.corpora import by_share, desk, scene
from stages.frame.types import UsageError
from stages.llm.hf import read_base
from stages.llm.roles import load_roles
from stages.llm.tokens import ChatTokenizer
from stages.pretrain import PretrainConfig, sizes
from stages.train.passes import mixed_nll, step_passes
from stages.train.warm import open_warm, rate_factor, rows_of, warm

ROLES = load_roles("service_desk")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_lettered(tmp_path_factory.mktemp("base"))


def drawn(n: int, seed: int = 0) -> list[Any]:
    rng = random.Random(seed)
    return [example for _ in range(n) for example in scene(desk, rng, ROLES, 4)]


def test_a_row_is_the_chat_as_the_template_writes_it_up_to_the_end_of_the_reply(base: Path) -> None:
    chat = ChatTokenizer(str(base))
    end = chat.tokenizer.eos_token_id
    examples = drawn(6)
    for example, row in zip(examples, rows_of(chat, examples, end), strict=True):
        whole = [*example.messages, {"role": "assistant", "content": example.reply}]
        rendered = chat.tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)
        assert list(row.ids) == rendered[: len(row.ids)] and row.ids[-1] == end
        assert chat.decode(row.completion_ids) == example.reply


def test_the_examples_of_a_scene_are_of_different_roles_in_one_conversation() -> None:
    rng = random.Random(3)
    found = [scene(desk, rng, ROLES, 4) for _ in range(40)]
    assert all(len({example.role for example in each}) == 4 for each in found)
    assert all(len({example.messages[1]["content"] for example in each}) == 1 for each in found)
    assert {example.role for each in found for example in each} == set(desk.SHARE)
    assert by_share(random.Random(0), {"a": 0.0, "b": 1.0}) == "b"


@pytest.mark.parametrize(("batch", "expected"), [(64, [4] * 16), (6, [4, 2]), (3, [3])])
def test_a_step_has_as_many_examples_as_it_should(batch: int, expected: list[int]) -> None:
    assert sizes(batch, 6) == expected


def test_the_loss_is_the_mean_over_all_reply_tokens_of_separate_passes(base: Path) -> None:
    """fp32, against a pass a row by the model's own logits."""
    chat = ChatTokenizer(str(base))
    model, rows = read_base(str(base), "float32")[0], rows_of(chat, drawn(3), chat.tokenizer.eos_token_id)
    with torch.no_grad():
        found = sum(float(mixed_nll(model, each)[0]) for each in step_passes({"warm": rows}, 300, "cpu"))
        apart = []
        for row in rows:
            logits = model(torch.tensor([row.ids])).logits[0].log_softmax(1)
            for t in range(len(row.prompt_ids), len(row.ids)):
                apart.append(-logits[t - 1, row.ids[t]])
    assert found == pytest.approx(float(torch.stack(apart).mean()), rel=1e-5)


@pytest.mark.parametrize("rank", [0, 4])
def test_warming_learns_the_replies_of_rows_that_it_did_not_see(base: Path, rank: int) -> None:
    """40 steps of 16 rows: the loss on held-out rows falls from 6.9, that of a uniform guess, to below 5.5."""
    model, chat, end = open_warm(str(base), rank=rank, seed=0)
    held_out = rows_of(chat, drawn(4, seed=9), end)

    def loss() -> float:
        with torch.no_grad():
            return sum(float(mixed_nll(model, each)[0]) for each in step_passes({"warm": held_out}, 0, "cpu"))

    rng, before = random.Random(1), loss()
    found = warm(
        model, lambda: rows_of(chat, [e for _ in range(4) for e in scene(desk, rng, ROLES, 4)], end), steps=40,
        lr=1e-2, flat=0.5, advance=lambda n: None,
    )  # fmt: skip
    assert before > 6 and loss() < 5.5 and len(found) == 40


def test_the_rate_rises_stays_and_falls_to_three_percent() -> None:
    factors = [rate_factor(step, 100, 0.4) for step in range(100)]
    assert factors[0] == 0.1 and factors[9:40] == [1.0] * 31 and factors[-1] == pytest.approx(0.046, abs=1e-3)
    assert factors[40:] == sorted(factors[40:], reverse=True)


def made(base: Path, tmp_path: Path, **config: Any) -> Any:
    bench = models.Bench(base, tmp_path)
    chosen = PretrainConfig(base=str(base), steps=2, batch=4, probe_rows=1, **config)
    return bench.run(pretrain.STAGE, chosen, {})


def test_an_adapter_is_kept_beside_its_merge_and_the_card_has_scores_before_and_after(
    base: Path, tmp_path: Path
) -> None:
    found = made(base, tmp_path, lora_rank=4)
    model, adapter = found.files["model"], load_file(found.files["adapter"] / "adapter_model.safetensors")
    merged, before = load_file(model / "model.safetensors"), load_file(base / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{letter}.weight"].float() for letter in "AB")
    assert b.abs().max() > 0 and a.shape[0] == 4
    expected = before[f"{name}.weight"] + 2 * b @ a
    assert torch.allclose(merged[f"{name}.weight"].float(), expected, atol=1e-2)
    assert {"pretrain/combine", "pretrain/combine_before"} <= set(found.metrics)
    card = (model / "README.md").read_text()
    assert "| role, on 1 held-out prompts each | right before | right now |" in card
    assert (model / "probe.jsonl").is_file() and not (model / "general.jsonl").exists()


def test_without_a_rank_all_weights_are_trained(base: Path, tmp_path: Path) -> None:
    found = made(base, tmp_path)
    merged, before = (load_file(folder / "model.safetensors") for folder in (found.files["model"], base))
    moved = [name for name in before if not torch.equal(merged[name].float(), before[name].bfloat16().float())]
    assert len(moved) > len(before) / 2 and "adapter" not in found.files


def test_agents_have_no_roles_to_warm(base: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"pretrain.base: the corpus 'agents' has no roles; desk, twenty, maths, wide have"
    ):
        made(base, tmp_path, corpus="agents")
