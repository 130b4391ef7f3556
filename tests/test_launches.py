"""`python -m benchmarks.speed.launches`: it counts a step of every method as the stages have it."""

from __future__ import annotations

import pytest
from models import tiny_llama

from benchmarks.pretend_gpu import pretended_gpu
from benchmarks.speed.launches import METHODS, Step, counted, opened
from stages.frame.sections import Kernels

LAYERS = 2
PRODUCTS = 7  # of a layer: queries, keys, values, what attention gives, and three of SwiGLU


@pytest.mark.parametrize("method", METHODS)
def test_a_fused_lora_layer_asks_for_two_operators_less_in_a_product(method: str) -> None:
    """Its low-rank product is scaled and added by the base product's own call. The backward pass asks for as many."""

    def step(kernels: Kernels) -> Step:
        return counted(method, opened(tiny_llama(177)), 177, kernels)

    with pretended_gpu():
        of_peft, fused = step("torch"), step("auto")
    assert of_peft.passes == fused.passes >= 1
    assert of_peft.launches("forward") - fused.launches("forward") == 2 * PRODUCTS * LAYERS * fused.passes
    assert fused.total("waits") == 1
    assert min(fused.launches("forward"), fused.launches("backward"), fused.launches("rest")) > 0
