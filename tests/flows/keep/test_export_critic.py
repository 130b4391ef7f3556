"""`turnwise export --what critic`: a model with its value head, to be used without this project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file

from flows import presets
from stages.learn.adapter import new_adapter, save_adapter
from stages.learn.value_head import load_head, new_head, save_head, state_values
from stages.store.tracking import Tracking
from turnwise import cli


def keep_run(home: Path, base: Path, soft: int, stage: str = "self_ac", alpha: float = 0.5) -> tuple[str, Any, Any]:
    """A stored run with an adapter and a head that do something: its id, the model with the adapter, the head."""
    from transformers import AutoModelForCausalLM

    model = models.shake(
        new_adapter(AutoModelForCausalLM.from_pretrained(base), rank=2, alpha=4.0, seed=0), spread=0.2
    ).eval()
    head = new_head(model, soft_len=soft, spread=1.0, seed=3)
    save_adapter(model, home / "made" / "adapter", "base")
    save_head(head, home / "made" / "head")
    run = presets.resolve(
        {
            "preset": "x",
            "model": {"path": str(base), "engine": "hf"},
            "self_ac": {"soft_prompt": soft, "gamma": 0.9, "alpha": alpha},
        }
    )
    config = {
        name: section
        for name, section in run.model_dump(mode="json").items()
        if name in ("self_ac", "task", "model", "roles")
    }
    tracking = Tracking(home / "mlflow")
    run_id = tracking.start(stage, f"{stage} 0", {})
    tracking.write_json(run_id, "config.json", {"stage": stage, "seed": 0, "iteration": 0, "config": config})
    for name in ("adapter", "head"):
        tracking.save(run_id, home / "made" / name, name)
    tracking.finish(run_id)
    return run_id, model, head


@pytest.mark.parametrize("soft", [0, 2])
def test_merged_model_and_head_give_the_logits_and_values_of_base_adapter_and_head(
    home: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], soft: int
) -> None:
    """To 1e-5 in fp32, read by transformers and safetensors alone where the prompt is text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(home)
    run_id, model, head = keep_run(home, base, soft)
    assert cli.main(["export", run_id, "out", "--what", "critic", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert {"model.safetensors", "head/value_head.json", "head/value_head.safetensors", "head/critic.json"} <= set(
        files
    )
    merged = AutoModelForCausalLM.from_pretrained(home / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(home / "out")
    told = json.loads((home / "out" / "head" / "critic.json").read_text())
    assert (told["run_id"], told["gamma"], bool(told["prompt_ids"])) == (run_id, 0.9, soft == 0)
    states = [[3, 5, 7, 9, 11], [4, 6]]
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor(states[:1])).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(input_ids=torch.tensor(states[:1])).logits
        assert float((wanted - plain).abs().max()) > 0.1  # the adapter does something
        assert float((merged(input_ids=torch.tensor(states[:1])).logits - wanted).abs().max()) < 1e-5
        values = state_values(model, head, states, told["prompt_ids"])
        again = load_head(home / "out" / "head", width=merged.config.hidden_size)
        assert float((state_values(merged, again, states, told["prompt_ids"]) - values).abs().max()) < 1e-5
        if not soft:
            prompt = [{"role": "assistant", "content": ""}, {"role": "user", "content": told["prompt"]}]
            asked = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
            assert [*told["prompt_ids"]] == asked[1:]  # behind a state, whose last token opens the reply
            tensors = load_file(home / "out" / "head" / "value_head.safetensors")
            for state, value in zip(states, values, strict=True):
                hidden = merged(
                    input_ids=torch.tensor([state + told["prompt_ids"]]), output_hidden_states=True
                ).hidden_states[-1][0, -1]
                assert float((hidden @ tensors["weight"] + tensors["bias"] - value).abs()) < 1e-5


def test_the_head_of_a_run_that_trained_no_critic_is_not_given_out(
    home: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    run_id, _, _ = keep_run(home, base, 0, alpha=0.0)
    assert cli.main(["export", run_id, "out", "--what", "critic"]) == 2
    assert "trained no critic: its self_ac.alpha is 0. Train one with alpha above 0" in capsys.readouterr().err


def test_a_run_without_a_head_is_told_in_one_sentence(
    home: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    run_id, _, _ = keep_run(home, base, 0, stage="grpo")
    assert cli.main(["export", run_id, "out", "--what", "critic"]) == 2
    told = capsys.readouterr().err
    assert (
        "wanted a run with a value head, one of self_ac, found one of grpo. See: turnwise runs --stage self_ac" in told
        and told.count("\n") == 1
    )
    assert not (home / "out").exists()
