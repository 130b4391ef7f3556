"""The steps that benchmarks/ times against each other are steps of the same episodes: what is compared in seconds is
equal in numbers.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.counts import causal_pairs, matmul_flops, shadow_pairs, traffic
from benchmarks.passes import grpo_log_probs, grpo_row, made_up, random_policy, self_ac_part, with_log_probs
from benchmarks.speed.per_turn import largest_difference, states_of
from stages.learn.value_head import new_head
from stages.train.actor_critic import SelfAcConfig, credited_pass

CRITIC = (1, 2, 3)


def test_grpos_pass_gives_the_log_probs_of_self_acs_from_fewer_tokens() -> None:
    model = random_policy(64, 2, 64, 50)
    episodes = with_log_probs(model, made_up(3, 2, 4, 3, 5, 50))
    row, part = grpo_row(episodes), self_ac_part(episodes, CRITIC, 0)
    with torch.no_grad():
        found = credited_pass(model, new_head(model, seed=0), part, SelfAcConfig(), value_grad_scale=1.0).log_probs_K
        assert torch.allclose(grpo_log_probs(model, row), found, atol=1e-5)
    assert row.ids.shape == (3, 3 + 2 * 7 - 3)  # nothing after the last action
    assert len(part.row.ids) == 3 * (3 + 2 * 7 - 3 + 5 + 3 * len(CRITIC))


@pytest.mark.parametrize("size", [1, 4])
def test_the_per_turn_step_has_self_acs_loss_and_gradients(size: int) -> None:
    model = random_policy(64, 2, 64, 50)
    head = new_head(model, spread=1.0, seed=0)
    part = self_ac_part(with_log_probs(model, made_up(2, 3, 4, 3, 3, 50)), CRITIC, 0)
    states = states_of(model, head, part)
    loss, gradient = largest_difference(model, head, part, states, CRITIC, size)
    assert loss < 1e-5 and gradient < 1e-5
    # Of another critic prompt it has not.
    assert max(largest_difference(model, head, part, states, (9, 9, 9), size)) > 1e-3


def test_pairs_of_query_and_key_equal_a_count_of_the_mask() -> None:
    [episode] = made_up(1, 2, 4, 3, 5, 50)
    row = self_ac_part([episode], CRITIC, 0).row
    n = len(episode.ids)
    shadows = sum(prefix + i + 1 for prefix in episode.prefixes for i in range(len(CRITIC)))
    assert causal_pairs([n]) == sum(i + 1 for i in range(n))
    assert shadow_pairs(row)[0] == shadows <= shadow_pairs(row)[1]


def test_counts_of_a_step_are_those_by_hand() -> None:
    x, y, row = torch.ones(8, 16), torch.ones(16, 4), torch.ones(16)
    assert matmul_flops(lambda: x @ y) == 2 * 8 * 16 * 4
    # One product and one sum in fp32; the transposed view moves nothing, and an expanded row is as small as the row.
    found = traffic(lambda: ((x @ y).t(), x + row.expand(8, 16)))
    assert found == {"mm": 4 * (8 * 16 + 16 * 4 + 8 * 4), "add": 4 * (2 * 8 * 16 + 16)}
