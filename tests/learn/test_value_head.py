"""The head's values against its formula and separate passes, the soft prompt, the gradient's factor, and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import shadows
import torch
from safetensors.torch import load_file
from shadows import CRITIC, assert_close, gradients, joint_loss, make_episode, make_head, with_adapter

from stages.frame.types import MissingInput, UsageError
from stages.learn.episode_row import pack
from stages.learn.value_head import ValueHead, episode_pass, load_head, new_head, save_head, state_values

EPISODES = [make_episode(5, 0), make_episode(2, 1), make_episode(1, 2)]


def test_a_value_is_weight_times_state_plus_bias_in_fp32() -> None:
    head = ValueHead(3)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
        head.bias.fill_(0.25)
    assert head(torch.tensor([[1.0, 1.0, 2.0], [0.0, 0.0, 0.0]])).tolist() == [0.25, 0.25]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_new_head_starts_near_zero_but_gives_the_body_a_gradient_and_depends_on_its_seed_alone() -> None:
    model = with_adapter()
    torch.manual_seed(1)
    head = new_head(model, seed=4)
    torch.manual_seed(2)
    assert torch.equal(new_head(model, seed=4).weight, head.weight) and not torch.equal(
        new_head(model, seed=5).weight, head.weight
    )
    _, values = episode_pass(model, head, pack(EPISODES, CRITIC, max_positions=None))
    assert 0 < float(values.detach().abs().max()) < 0.05
    assert any(float(g.abs().max()) > 0 for g in gradients(((values - 1) ** 2).sum(), model).values())


def test_a_soft_prompt_starts_within_the_embeddings() -> None:
    model = with_adapter()
    table = model.get_base_model().get_input_embeddings().weight.detach()
    soft = new_head(model, soft_len=4, seed=0).soft
    assert soft is not None and soft.shape == (4, table.shape[1])
    # 64 draws: their root mean square is within 40 % of the deviation they were drawn with.
    standard = ((soft - table.mean(0)) / table.std(0)).square().mean().sqrt()
    assert 0.6 < float(standard.detach()) < 1.4


@pytest.mark.parametrize("turns", [[5], [17, 1, 3]])
def test_a_soft_prompt_equals_separate_passes_with_gradients(turns: list[int]) -> None:
    model, episodes = with_adapter("Qwen3"), [make_episode(n, n) for n in turns]
    head = make_head(model, soft_len=2)
    fast, slow = shadows.packed(model, head, episodes, ()), shadows.separate(model, head, episodes, ())
    assert_close(fast.values, slow.values)
    assert_close(fast.actions, slow.actions)
    found, wanted = (gradients(joint_loss(model, each, episodes), model, head) for each in (fast, slow))
    assert float(wanted["1.soft"].abs().max()) > 1e-3
    for name, grad in wanted.items():
        assert_close(found[name], grad, name)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 2.0])
def test_the_factor_scales_what_the_values_send_into_the_body_and_nothing_else(scale: float) -> None:
    model = with_adapter()
    head, packed = make_head(model), pack(EPISODES, CRITIC, max_positions=None)
    actions, values = episode_pass(model, head, packed, value_grad_scale=scale)
    plain_actions, plain_values = episode_pass(model, head, packed)
    assert_close(actions, plain_actions)
    assert_close(values, plain_values)
    alone = gradients((plain_values**2).sum(), model, head)
    actor = gradients(plain_actions.square().sum(), model, head)
    both = gradients((values**2).sum() + actions.square().sum(), model, head)
    for name, grad in both.items():
        assert_close(grad, actor[name] + (scale if name.startswith("0.") else 1.0) * alone[name], name)


@pytest.mark.parametrize("soft_len", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 4, 99])
def test_values_of_single_states_equal_the_packed_ones(soft_len: int, batch_size: int) -> None:
    model, critic = with_adapter("Qwen2"), () if soft_len else CRITIC
    head = make_head(model, soft_len)
    states = [e.ids[:prefix] for e in EPISODES for prefix in e.prefixes]
    with torch.no_grad():
        found = state_values(model, head, states, critic, batch_size=batch_size)
        assert_close(found, shadows.packed(model, head, EPISODES, critic).values)
    assert state_values(model, head, [], critic).shape == (0,)


def test_gradients_of_single_states_equal_the_packed_ones() -> None:
    model = with_adapter()
    head = make_head(model)
    states = [e.ids[:prefix] for e in EPISODES for prefix in e.prefixes]
    _, values = episode_pass(model, head, pack(EPISODES, CRITIC, max_positions=None))
    wanted = gradients((values**2).sum(), model, head)
    for name, grad in gradients((state_values(model, head, states, CRITIC) ** 2).sum(), model, head).items():
        assert_close(grad, wanted[name], name)


def test_what_does_not_fit_together_is_refused() -> None:
    model = with_adapter()
    text, soft = make_head(model), make_head(model, 2)
    row, places = pack(EPISODES, CRITIC, max_positions=None), pack(EPISODES, (), max_positions=None, soft_len=2)
    for scale in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="factor of at least 0"):
            episode_pass(model, text, row, value_grad_scale=scale)
    with pytest.raises(ValueError, match="soft prompt of 2 vectors, the row was packed for 0"):
        episode_pass(model, soft, row)
    with pytest.raises(ValueError, match="soft prompt would never learn"):
        episode_pass(model, soft, places, value_grad_scale=0.0)
    for head, critic in ((text, ()), (soft, CRITIC)):
        with pytest.raises(ValueError, match=f"found {len(critic)} ids and {head.soft_len} vectors"):
            state_values(model, head, [(1, 2)], critic)
    with pytest.raises(ValueError, match="found an empty one at index 1"):
        state_values(model, text, [(1, 2), ()], CRITIC)


@pytest.mark.parametrize("soft_len", [0, 3])
def test_saved_and_loaded_it_is_the_same_to_the_bit(soft_len: int, tmp_path: Path) -> None:
    head = make_head(with_adapter(), soft_len)
    save_head(head, tmp_path / "head")
    assert sorted(file.name for file in (tmp_path / "head").iterdir()) == ["value_head.json", "value_head.safetensors"]
    again = load_head(tmp_path / "head", width=16)
    assert again.soft_len == soft_len and all(p.requires_grad for p in again.parameters())
    one, other = head.state_dict(), again.state_dict()
    assert one.keys() == other.keys() == load_file(tmp_path / "head" / "value_head.safetensors").keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_head_of_another_width_and_a_missing_one_are_told_in_one_sentence(tmp_path: Path) -> None:
    save_head(ValueHead(16), tmp_path / "head")
    with pytest.raises(
        UsageError,
        match="value head in 'head' reads states of width 16, the model's have 32; use the model it was trained on",
    ) as caught:
        load_head(tmp_path / "head", width=32)
    with pytest.raises(
        MissingInput, match=r"wanted value_head.json and value_head.safetensors .* in the folder 'nowhere'"
    ) as missing:
        load_head(tmp_path / "nowhere", width=16)
    assert "\n" not in str(caught.value) + str(missing.value)
