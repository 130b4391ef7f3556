"""The packed row is what separate passes are, in values and gradients; and what is no fit for it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import shadows
import torch
from shadows import CRITIC, assert_close, gradients, joint_loss, make_episode, make_head, with_adapter
from torch import Tensor

from benchmarks.pretend_gpu import pretended_gpu
from stages.frame.types import UsageError
from stages.learn import tree_layout
from stages.learn.episode_row import EpisodeIds, pack
from stages.learn.returns import turn_mask
from stages.learn.tree_attention import NAME, body_pass, check_masks, tree_attention
from stages.learn.tree_layout import layout_of
from stages.learn.value_head import episode_pass

LONG_CRITIC = (7, 3, 11, 2, 19, 5, 23, 1, 30)  # enough shadows at 17 turns for several groups


def assert_same(model: Any, episodes: list[EpisodeIds], critic: tuple[int, ...]) -> None:
    """Values, states and visible logits, and gradients of the joint loss, of the packed row and of both twins."""
    head = make_head(model)
    runs: tuple[shadows.Run, ...] = (shadows.packed, shadows.interleaved, shadows.separate)
    project = model.get_base_model().get_output_embeddings()
    found = [run(model, head, episodes, critic) for run in runs]
    grads = [gradients(joint_loss(model, each, episodes), model, head) for each in found]
    assert any("lora" in name and float(g.abs().max()) > 0.1 for name, g in grads[2].items())
    for which in (0, 1):
        assert_close(found[which].values, found[2].values, "V")
        assert_close(found[which].actions, found[2].actions, "states of actions")
        assert_close(project(found[which].visible), project(found[2].visible), "visible logits")
        for name, grad in grads[2].items():
            assert_close(grads[which][name], grad, name)


@pytest.mark.parametrize(
    ("kind", "turns", "critic"),
    [
        ("Llama", [1], CRITIC), ("Qwen2", [2], CRITIC), ("Qwen3", [5], (7,)), ("Llama", [17], LONG_CRITIC),
        ("Qwen2", [1, 2], CRITIC), ("Llama", [17, 5, 1, 2], LONG_CRITIC), ("Qwen2", [5, 17], CRITIC), ("Qwen3", [2, 17, 1], LONG_CRITIC),
    ],
)  # fmt: skip
def test_packed_row_equals_interleaved_row_and_separate_passes_with_gradients(
    kind: str, turns: list[int], critic: tuple[int, ...]
) -> None:
    assert_same(with_adapter(kind), [make_episode(n, seed=i) for i, n in enumerate(turns)], critic)


def test_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many groups as there may be, with a longest episode of few turns: its last state stands in an early group."""
    monkeypatch.setattr(tree_layout, "LEAST_ROWS", 1)
    long = make_episode(1, 3)
    long = replace(long, ids=(*long.ids, *range(30)))
    episodes = [make_episode(6, 1), long]
    assert len(layout_of(pack(episodes, CRITIC, max_positions=None).tree).groups) == tree_layout.MOST_GROUPS
    assert_same(with_adapter(), episodes, CRITIC)


def test_a_mask_as_numbers_is_made_once_and_gives_what_the_mask_gives_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = pack([make_episode(17, 0)], LONG_CRITIC, max_positions=None)
    model, layout = with_adapter(), layout_of(row.tree)
    found = body_pass(model, row.tree, layout=layout)
    (bias,) = {
        id(x): x for group in layout.groups[:1] for x in (*group.biases.values(), group.bias(found.dtype))
    }.values()
    assert torch.equal(bias, torch.zeros(bias.shape).masked_fill(~layout.groups[0].mask, -torch.inf))
    monkeypatch.setattr(tree_layout.Group, "bias", lambda group, dtype: group.mask)
    assert torch.equal(body_pass(model, row.tree), found)


def test_on_a_gpu_few_branches_take_one_call_with_the_same_states_and_gradients() -> None:
    row, model = pack([make_episode(17, 0)], LONG_CRITIC, max_positions=None), with_adapter()
    parameters = [p for p in model.parameters() if p.requires_grad]
    wanted = body_pass(model, row.tree)
    # Not their square: behind the last norm it is nearly constant, and its gradient is rounding.
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    slow = torch.autograd.grad((wanted * weights).sum(), parameters)
    with pretended_gpu():
        there, moved = row.tree.to("cuda"), with_adapter().to("cuda")
        assert (len(layout_of(row.tree).groups), len(layout_of(there).groups)) == (3, 1)
        found = body_pass(moved, there)
        fast = torch.autograd.grad(
            (found * weights.to("cuda")).sum(), [p for p in moved.parameters() if p.requires_grad]
        )
        assert_close(found.cpu(), wanted, "states")
        for one, other in zip(fast, slow, strict=True):
            assert_close(one.cpu(), other, "gradient")


def values_of(model: Any, episodes: list[EpisodeIds], critic: tuple[int, ...] = CRITIC) -> Tensor:
    with torch.no_grad():
        return episode_pass(model, make_head(model), pack(episodes, critic, max_positions=None))[1]


def test_the_first_action_token_is_predicted_from_before_the_critic_prompt_and_not_from_its_end() -> None:
    model, episodes = with_adapter(), [make_episode(5, 0), make_episode(2, 1)]
    head, packed = make_head(model), pack(episodes, CRITIC, max_positions=None)
    wanted = shadows.separate(model, head, episodes, CRITIC).actions
    first = torch.diff(packed.turn_of_token, prepend=torch.tensor([-1])) != 0
    trapped = packed.source_positions.clone()
    trapped[first] = packed.value_positions[turn_mask(packed.n_turns, packed.value_positions.shape[1])]
    actions, _ = episode_pass(model, head, packed)
    wrong, _ = episode_pass(model, head, replace(packed, source_positions=trapped))
    assert_close(actions, wanted)
    assert bool(((wrong - wanted).abs().amax(1) > 0.05)[first].all())
    assert_close(wrong[~first], wanted[~first])


def test_an_episodes_place_in_the_row_changes_nothing() -> None:
    model, episodes = with_adapter("Qwen3"), [make_episode(n, n) for n in (5, 1, 9)]
    together = values_of(model, episodes)
    for order in ([2, 0, 1], [1, 2, 0]):
        moved = values_of(model, [episodes[i] for i in order])
        for at, i in enumerate(order):
            assert_close(moved[at, : episodes[i].n_turns + 1], together[i, : episodes[i].n_turns + 1])


def test_neither_padding_nor_a_neighbour_leaks_into_an_episode() -> None:
    model, short = with_adapter(), make_episode(2, 0)
    alone = values_of(model, [short])[0]
    for seed in (1, 2):
        beside = values_of(model, [make_episode(11, seed), short])
        assert_close(beside[1, :3], alone)
        assert beside[1, 3:].eq(0).all() and bool(torch.isfinite(beside).all())


def test_what_comes_after_a_state_does_not_change_its_value() -> None:
    model, episode = with_adapter(), make_episode(5, 7)
    before = values_of(model, [episode])[0]
    for k in range(5):
        place = episode.prefixes[k]
        ids = tuple((token + 1) % shadows.VOCABULARY if t >= place else token for t, token in enumerate(episode.ids))
        after = values_of(model, [replace(episode, ids=ids)])[0]
        assert torch.equal(after[: k + 1], before[: k + 1])
        assert bool(((after - before).abs() > 1e-3)[k + 1 :].all())


def test_no_square_mask_is_built() -> None:
    model, seen = with_adapter(), []
    inner = model.get_base_model().model
    inner.layers[0].register_forward_pre_hook(
        lambda _, args, options: seen.append(options["attention_mask"]), with_kwargs=True
    )
    packed = pack([make_episode(17, 0)], LONG_CRITIC, max_positions=None)
    body_pass(model, packed.tree)
    assert [mask.numel() for mask in seen] == [0]
    layout = layout_of(packed.tree)
    assert sum(group.mask.numel() for group in layout.groups) < int((packed.shadow > 0).sum()) * len(packed.ids)


def test_the_model_is_put_back_and_plain_passes_stay_plain_meanwhile() -> None:
    model = with_adapter()
    config = model.get_base_model().config
    ids, padded = torch.tensor([[5, 9, 3, 8, 1, 4], [0, 0, 3, 8, 1, 4]]), torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    before, wanted = config._attn_implementation, model(input_ids=ids, attention_mask=padded).logits
    with tree_attention(model), tree_attention(model):
        assert config._attn_implementation == NAME
        assert torch.equal(model(input_ids=ids, attention_mask=padded).logits, wanted)
    assert config._attn_implementation == before != NAME
    with pytest.raises(RuntimeError, match="stop"), tree_attention(model):
        raise RuntimeError("stop")
    assert config._attn_implementation == before


@pytest.mark.parametrize("turns", [[5], [5, 2]])
def test_gradient_checkpointing_gives_the_same_gradients(turns: list[int]) -> None:
    model, episodes = with_adapter().train(), [make_episode(n, n) for n in turns]
    head = make_head(model)
    wanted = gradients(joint_loss(model, shadows.packed(model, head, episodes), episodes), model, head)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="put forward and backward inside `with tree_attention"):
        shadows.packed(model, head, episodes)
    with tree_attention(model):
        found = gradients(joint_loss(model, shadows.packed(model, head, episodes), episodes), model, head)
    for name, grad in wanted.items():
        assert_close(found[name], grad, name)


@pytest.mark.parametrize("turns", [[5], [5, 2]])
def test_under_autocast_it_stays_near_fp32(turns: list[int]) -> None:
    """bf16 keeps 8 bits: 1 % of values of size 1 after two layers, 5 % of the gradients' norm."""
    model, episodes = with_adapter(), [make_episode(n, n) for n in turns]
    head = make_head(model)
    wanted = shadows.packed(model, head, episodes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = shadows.packed(model, head, episodes)
        loss = joint_loss(model, found, episodes)
    assert found.values.dtype == torch.float32
    assert float((found.values - wanted.values).detach().abs().max()) < 0.03
    exact, rough = (gradients(x, model, head) for x in (joint_loss(model, wanted, episodes), loss))
    total = sum(float(g.square().sum()) for g in exact.values())
    assert sum(float((rough[name] - g).square().sum()) for name, g in exact.items()) < 0.05**2 * total


@pytest.mark.parametrize("kind", shadows.KINDS)
def test_llama_and_qwen_pass_the_check_and_keep_their_mode(kind: str) -> None:
    model = with_adapter(kind).train()
    model.get_base_model().model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    check_masks(model)
    assert [module.training for module in model.modules()] == modes
    check_masks(shadows.tiny(kind).bfloat16())


NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.0)
ROPE = {"rope_theta": 1e4, "factor": 4.0}
LONG = ROPE | {
    "rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [4.0, 8.0], "original_max_position_embeddings": 64,
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a sliding window": (
        lambda: shadows.tiny("Mistral", sliding_window=8),
        "whole row of 54 positions, found a sliding window of 8;",
    ),
    "Qwen2's": (
        lambda: shadows.tiny("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "found a sliding window of 8;",
    ),
    "recurrent layers": (lambda: shadows.tiny("RecurrentGemma"), "RecurrentGemmaForCausalLM is off by"),
    "its own attention": (
        lambda: shadows.tiny("XGLM", d_model=16, num_layers=2, attention_heads=2, ffn_dim=8, **NO_DROPOUT),
        "whose attention can be replaced, found XGLM",
    ),
    "scaled logits": (lambda: shadows.tiny("Granite", logits_scaling=4.0), "GraniteForCausalLM is off by"),
    "capped logits": (
        lambda: shadows.tiny("Gemma2", final_logit_softcapping=2.0, layer_types=["full_attention"] * 2),
        "Gemma2ForCausalLM is off by",
    ),
    "rotary frequencies by length": (
        lambda: shadows.tiny("Llama", rope_parameters=ROPE | {"rope_type": "dynamic"}, max_position_embeddings=64),
        "found rope_parameters.rope_type = 'dynamic' in its config",
    ),
    "two sets of them": (
        lambda: shadows.tiny("Llama", rope_parameters=LONG),
        "found rope_parameters.rope_type = 'longrope' in its config",
    ),
    "two sets, in its older file": (
        lambda: shadows.tiny("Llama", rope_scaling=LONG),
        "found rope_parameters.rope_type = 'longrope' in its config",
    ),
    "two sets in one kind of layer": (
        lambda: shadows.tiny(
            "Gemma3",
            rope_parameters={"full_attention": LONG, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        ),
        "found rope_parameters.full_attention.rope_type = 'longrope' in its config",
    ),
    "chunks": (
        lambda: shadows.tiny("Llama4", num_local_experts=2, attention_chunk_size=64, pad_token_id=0),
        "found attention_chunk_size = 64 in its config",
    ),
    "dropout of Llama": (
        lambda: shadows.tiny("Llama", attention_dropout=0.1),
        "found attention_dropout = 0.1 in its config",
    ),
    "dropout of Phi": (
        lambda: shadows.tiny("Phi3", resid_pdrop=0.2, pad_token_id=0),
        "found resid_pdrop = 0.2 in its config",
    ),
    "another body": (lambda: shadows.tiny("GPTNeoX"), "found GPTNeoXForCausalLM ("),
}


@pytest.mark.parametrize("why", REFUSED)
def test_an_architecture_that_is_no_fit_is_refused_in_one_sentence(why: str) -> None:
    make, said = REFUSED[why]
    with pytest.raises(UsageError) as caught:
        check_masks(make())
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_that_ignores_positions_is_refused_by_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shadows.tiny("Llama")
    rotary = model.model.rotary_emb
    real = rotary.forward
    monkeypatch.setattr(rotary, "forward", lambda x, position_ids: real(x, torch.arange(x.shape[1])[None]))
    with pytest.raises(UsageError, match=r"LlamaForCausalLM is off by \d+\.\d% \(allowed 0\.1%\)"):
        check_masks(model)


def test_a_window_that_an_episode_outgrows_later_is_refused_then() -> None:
    model = shadows.tiny("Mistral", sliding_window=64)
    check_masks(model)
    with pytest.raises(UsageError, match="found a sliding window of 64"):
        values_of(model, [make_episode(20, 0)])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"rope_parameters": ROPE | {"rope_type": "dynamic"}, "max_position_embeddings": 64}),
        ("Llama", {"rope_parameters": LONG}),
        ("Llama4", {"num_local_experts": 2, "attention_chunk_size": 64, "pad_token_id": 0}),
        ("Llama", {"attention_dropout": 0.1}),
    ],
)
def test_what_is_refused_by_its_field_gives_other_values_in_a_packed_row(kind: str, changes: dict[str, Any]) -> None:
    """At 86 positions, past the 64 of the config; dropout in training mode, where it shows at any length."""
    model, episodes = shadows.tiny(kind, **changes), [make_episode(20, 0)]
    model.train("attention_dropout" in changes)
    head = make_head(model)
    packed, apart = shadows.packed(model, head, episodes), shadows.separate(model, head, episodes, CRITIC)
    assert float((packed.values - apart.values).detach().abs().max()) > 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": ROPE | {"rope_type": "linear"}},
        {"rope_parameters": ROPE | {"rope_type": "yarn", "original_max_position_embeddings": 1024}},
        {"rope_parameters": ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}},
        {"classifier_dropout": 0.1},
    ],
)  # fmt: skip
def test_rotary_scaling_that_a_pass_does_not_change_and_a_classifier_s_dropout_pass_the_check(
    changes: dict[str, Any],
) -> None:
    check_masks(shadows.tiny("Llama", **changes))
