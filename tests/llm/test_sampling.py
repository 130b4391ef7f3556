"""The draw of a token, against the whole vocabulary in fp64; and how batches are cut and rows that are done leave."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stages.frame.types import Completion, Request
from stages.llm import hf
from stages.llm.hf import HfEngine, parts_of
from stages.llm.sampling import BLOCK, sample

BASE = Path(__file__).parents[2] / "data" / "base"


def slow(logits_BV: Tensor, temperature_B1: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """The draw by fp64 over the whole vocabulary; and how far the number is from the nearest edge of two tokens."""
    cumulative = (logits_BV.double() / temperature_B1.clamp(min=1e-6)).softmax(1).cumsum(1)
    place = uniform_B[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, place, right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)
    distance = (cumulative - place).abs().amin(1)
    return torch.where(temperature_B1[:, 0] > 0, drawn, logits_BV.argmax(1)), distance


@pytest.mark.parametrize("vocabulary", [40, 1000, BLOCK, BLOCK + 1, 5000, 49152])
@pytest.mark.parametrize("heat", [0.0, 0.05, 0.7, 1.0, 3.0])
def test_a_draw_is_that_of_the_whole_vocabulary_in_fp64(vocabulary: int, heat: float) -> None:
    """400 draws each: equal, but for numbers within 1e-6 of an edge, of which there are a few in a thousand."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(400, vocabulary, generator=generator)
    uniform = torch.rand(400, generator=generator, dtype=torch.float64)
    temperature = torch.full((400, 1), heat)
    expected, distance = slow(logits, temperature, uniform)
    found = sample(logits, temperature, uniform)
    differs = found != expected
    assert not (differs & (distance > 1e-6)).any()
    assert int(differs.sum()) <= (0 if vocabulary <= BLOCK or heat == 0 else 4)


@pytest.mark.parametrize("vocabulary", [40, 5000])
def test_a_token_without_weight_is_never_drawn(vocabulary: int) -> None:
    logits = torch.full((5, vocabulary), -torch.inf)
    logits[:, [3, vocabulary - 2]] = 0.0
    uniform = torch.tensor([0.0, 0.499, 0.501, 0.999999, 1 - 2**-53], dtype=torch.float64)
    found = sample(logits, torch.ones(5, 1), uniform)
    assert found.tolist() == [3, 3, *[vocabulary - 2] * 3]


@pytest.mark.parametrize("vocabulary", [40, BLOCK + 9, 152_064])
def test_numbers_that_are_not_finite_draw_a_token_of_the_vocabulary(vocabulary: int) -> None:
    """So that the engine reads its log-prob, and refuses it in a sentence; past the end a GPU would end the process."""
    uniform = torch.tensor([0.1, 0.9], dtype=torch.float64)
    found = sample(torch.full((2, vocabulary), torch.nan), torch.ones(2, 1), uniform)
    assert all(0 <= token < vocabulary for token in found.tolist())


def test_a_batch_is_cut_where_its_padding_costs_more_than_another_batch() -> None:
    """Of 10 prompts of 10 tokens and 10 of 100, the first ten have 900 tokens of padding."""
    lengths = [10] * 10 + [100] * 10
    assert parts_of(lengths, int(hf.CUT / 900) + 1) == [range(10), range(10, 20)]
    assert parts_of(lengths, int(hf.CUT / 900) - 1) == [range(20)]
    assert parts_of([7], 10**12) == [range(1)] and parts_of([5, 5, 5], 10**12) == [range(3)]
    found = parts_of(sorted(random.Random(0).choices(range(1, 300), k=200)), 10**9)
    assert [i for part in found for i in part] == list(range(200)) and len(found) > 2


def requests(n: int, heat: float) -> list[Request]:
    rng = random.Random(n)
    return [Request(tuple(rng.choices(range(6, 60), k=rng.randint(3, 90))), 12, heat, i) for i in range(n)]


def same(found: list[Completion], expected: list[Completion]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_cut_batches_and_rows_that_stay_say_what_one_request_at_a_time_says(
    monkeypatch: pytest.MonkeyPatch, heat: float
) -> None:
    asked, engine = requests(24, heat), HfEngine(str(BASE))
    alone = [engine.generate([one])[0] for one in asked]
    assert len({len(one.token_ids) for one in alone}) > 1  # some end sooner
    same(engine.generate(asked), alone)
    monkeypatch.setattr(hf, "LARGE", 0)  # as of a large model: rows that are done stay for a while
    same(engine.generate(asked), alone)
    monkeypatch.setattr(hf, "CUT", 1e6)
    assert len(parts_of(sorted(len(one.prompt_ids) for one in asked), engine._n_weights)) > 3
    same(engine.generate(asked), alone)
