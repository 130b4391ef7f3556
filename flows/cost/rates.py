"""The constants that turn work into hours, each with its source: measured on a card, or assumed.

The one place for them; `turnwise plan` prints those that it used, and --assume changes them. A measured share is of the work as the plan counts
it: attention and adapter included. So the plan of a measured step gives its seconds back (tests/flows/test_plan_rates.py).
[ours]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

WHEN = {
    "h200": "November 2026, torch 2.11",
    "cpu": "one core of two, November 2026, torch 2.13",
}
"""Card -> when and with what its rates were measured."""


@dataclass(frozen=True)
class Rate:
    """value in units of `what`. on: the card that it was measured on; "" = assumed."""

    value: float
    what: str
    source: str
    on: str = ""
    given: bool = False  # by --assume

    def kind(self, card: str) -> str:
        """Where the value is from, for a plan of a run on `card`."""
        if not self.on:
            return "given" if self.given else "assumed"
        return "measured" if self.on == card else f"measured on an {self.on}"


GPU = {
    "train_trees": Rate(
        0.38, "of the peak, training on trees of rows",
        "a 7B NLAC step of 13 turns and 26 branches: 14,952 tokens in 1,998 ms by FlexAttention and fused LoRA; "
        ".32 at 6 FLOP a weight and token", "h200",
    ),
    "train_rows": Rate(
        0.5, "of the peak, training on rows of episodes",
        "a 7B Self-AC row of 4 episodes: 14,176 tokens in 1,275 ms by fused LoRA and Liger; .48 at 6 FLOP a weight and token", "h200",
    ),
    "pass": Rate(
        0.009, "s a layer at least, a training pass",
        "a 0.5B GRPO pass, 24 layers in 223 ms: launches, not arithmetic", "h200",
    ),
    "branch": Rate(
        0.0004, "s a layer more, a row of that pass",
        "SmolLM2-135M's critic step of 48 rows, 30 layers in 0.7 to 1 s; 0.5B Self-AC, 24 layers and 20 rows in 441 ms", "h200",
    ),
    "read": Rate(0.45, "of the peak, reading prompts by vLLM", "no measurement"),
    "decode": Rate(0.6, "of the bandwidth, decoding by vLLM", "no measurement"),
    "step": Rate(0.0002, "s a layer at least, a decoding step of vLLM", "no measurement"),
    "hf_read": Rate(0.25, "of the peak, reading padded prompts by transformers", "no measurement"),
    "hf_decode": Rate(0.2, "of the bandwidth, decoding by transformers", "no measurement"),
    "hf_step": Rate(0.001, "s a layer at least, a decoding step of transformers", "no measurement"),
    "requests": Rate(
        1024, "requests that vLLM decodes at once", "vLLM 0.32's default of a card of 70 GiB or more, but for the A100"
    ),
    "link": Rate(300.0, "GB a second between a training device and the others", "no measurement; NVLink of an H100, about two thirds of 450"),
    "context": Rate(2.0, "GiB that a CUDA process takes for itself", "no measurement"),
    "spare": Rate(
        0.9, "of the memory that training can use: the allocator's pieces never fit together wholly",
        "a step planned at 4.0 GiB took 4.4", "h200",
    ),
}  # fmt: skip

_DEMO = "turnwise run demo --plain --set iterations=2"
CPU = {
    **GPU,
    "train_trees": Rate(
        0.35, "of the peak, training on trees of rows", f"critic and distill of {_DEMO}: 18.4 s", "cpu"
    ),
    "train_rows": Rate(0.35, "of the peak, training on rows of episodes", "as trees"),
    "pass": Rate(0.0, "s a layer at least, a training pass", "small beside the arithmetic"),
    "branch": Rate(0.0, "s a layer more, a row of that pass", "small beside the arithmetic"),
    "hf_read": Rate(0.4, "of the peak, reading padded prompts", f"targets and refine of {_DEMO}: 13.5 s", "cpu"),
    "hf_step": Rate(0.0, "s a layer at least, a decoding step", "small beside the arithmetic"),
}


FEWER_REQUESTS = Rate(256, GPU["requests"].what, "vLLM 0.32's default of the A100, and of cards below 70 GiB")


def rates_of(card: str, memory: float = 80.0) -> dict[str, Rate]:
    """The rates of a device by its name in `shapes.DEVICES`, and by its GiB."""
    if card == "cpu":
        return CPU
    return GPU if memory >= 70 and not card.startswith("a100") else GPU | {"requests": FEWER_REQUESTS}


def changed(rates: Mapping[str, Rate], given: Mapping[str, float]) -> dict[str, Rate]:
    """The rates with those values in place of their own."""
    return {
        name: replace(rate, value=given[name], source="--assume", on="", given=True) if name in given else rate
        for name, rate in rates.items()
    }


def weakest(rates: Iterable[Rate], card: str) -> str:
    """Where a figure is from that rests on all of these rates: "assumed" if one of them is."""
    return min((rate.kind(card) for rate in rates), default="counted")
