"""The transformers engine against full forward passes, and what it must not depend on: batch, order, neighbours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from scipy.stats import chi2

from stages.frame.types import Completion, EngineUnavailable, Message, Request, UsageError
from stages.learn.adapter import new_adapter, save_adapter
from stages.llm.hf import HfEngine, load_base, model_hash
from stages.llm.sampling import sample

CHATS: list[list[Message]] = [
    [{"role": "user", "content": "Ana, gold, wants refund for lamp."}],
    [{"role": "system", "content": "Service desk. check photo receipt."}, {"role": "user", "content": "pass."}],
    [
        {"role": "user", "content": "fail."},
        {"role": "assistant", "content": "Action: check photo"},
        {"role": "user", "content": "photo done."},
    ],
    [{"role": "user", "content": "w1"}],
]


@pytest.fixture(scope="module")
def engine(base: Path) -> HfEngine:
    return HfEngine(str(base), batch=3)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six adapters, each of which changes the model in a way of its own."""
    folder, found = tmp_path_factory.mktemp("adapters"), []
    for seed in range(6):
        model = models.shake(new_adapter(load_base(str(base), "float32")[0], rank=2, alpha=4.0, seed=0), seed)
        save_adapter(model, folder / str(seed), model_hash(str(base)))
        found.append(folder / str(seed))
    return found


def requests(engine: HfEngine, n: int = 12, **changes: Any) -> list[Request]:
    found = []
    for i in range(n):
        found.append(
            replace(Request(engine.encode(CHATS[i % len(CHATS)]), 4 + i % 9, 0.5 + 0.1 * i, 1000 + i), **changes)
        )
    return found


def same(one: Sequence[Completion], other: Sequence[Completion]) -> bool:
    pairs = list(zip(one, other, strict=True))
    ids = all((a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason) for a, b in pairs)
    # fp32 through two layers, in batches padded differently.
    return ids and all(a.log_probs == pytest.approx(b.log_probs, abs=1e-5) for a, b in pairs)


def full_forward(model: Any, request: Request, completion: Completion) -> list[float]:
    """Log-probs of the completion's tokens from one pass over the whole text, without cache or padding."""
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].double()
    start = len(request.prompt_ids)
    log_probs = [row - torch.log(torch.exp(row).sum()) for row in logits]
    return [float(log_probs[start + t - 1][token]) for t, token in enumerate(completion.token_ids)]


def test_batched_sampling_is_one_by_one(engine: HfEngine) -> None:
    asked = requests(engine)
    together = engine.generate(asked)
    assert same(together, [engine.generate([one])[0] for one in asked])
    assert len({c.token_ids for c in together}) > 6


def test_a_prompt_that_several_requests_share_is_read_once_and_answered_as_alone(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HfEngine(str(base))
    asked = [replace(one, seed=100 * i + k) for i, one in enumerate(requests(engine, 3)) for k in range(3)]
    alone = [engine.generate([one])[0] for one in asked]
    read: list[int] = []
    real = type(engine._base).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(kwargs["input_ids"].numel())
        return real(self, *args, **kwargs)

    monkeypatch.setattr(type(engine._base), "forward", forward)
    assert same(engine.generate(asked), alone)
    assert read[0] == 3 * max(len(one.prompt_ids) for one in asked) and max(read[1:]) <= len(asked)


def test_the_seed_belongs_to_the_request_so_order_changes_nothing(engine: HfEngine) -> None:
    asked = requests(engine)
    assert same(engine.generate(asked[::-1]), engine.generate(asked)[::-1])
    assert same(engine.generate(asked), engine.generate(asked))
    # Hot, so that two draws that agree in all of 10 tokens would be chance of less than 1e-6.
    hot = [Request(asked[0].prompt_ids, 10, 3.0, seed) for seed in range(8)]
    assert len({c.token_ids for c in engine.generate(hot)}) == 8


def test_log_probs_equal_a_full_forward_pass(base: Path, engine: HfEngine) -> None:
    model, _ = load_base(str(base), "float32")
    asked = requests(engine)
    for request, completion in zip(asked, engine.generate(asked), strict=True):
        assert len(completion.log_probs) == len(completion.token_ids)
        assert completion.log_probs == pytest.approx(full_forward(model, request, completion), abs=1e-5)


def test_temperature_0_is_greedy_whatever_the_seed(base: Path, engine: HfEngine) -> None:
    model, _ = load_base(str(base), "float32")
    for chat in CHATS:
        prompt = engine.encode(chat)
        found = engine.generate([Request(prompt, 6, 0.0, seed) for seed in (1, 2)])
        assert found[0].token_ids == found[1].token_ids
        ids = list(prompt)
        for token in found[0].token_ids:
            with torch.no_grad():
                assert token == int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)


def test_max_tokens_is_each_request_s_own(engine: HfEngine) -> None:
    found = engine.generate([Request(engine.encode(CHATS[0]), n, 2.0, n) for n in (1, 2, 5, 9)])
    for n, completion in zip((1, 2, 5, 9), found, strict=True):
        assert len(completion.token_ids) == n or completion.finish_reason == "stop"
        assert len(completion.token_ids) <= n
    assert found[0].finish_reason == "length"


def test_the_stop_token_ends_a_reply_and_is_trained_on_but_not_said(base: Path, engine: HfEngine) -> None:
    _, tokenizer = load_base(str(base), "float32")
    found = engine.generate([Request(engine.encode(CHATS[i % 4]), 150, 3.0, i) for i in range(12)])
    stopped = [c for c in found if c.finish_reason == "stop"]
    assert stopped
    for completion in found:
        assert tokenizer.eos_token_id not in completion.token_ids[:-1]
        assert (completion.token_ids[-1] == tokenizer.eos_token_id) == (completion.finish_reason == "stop")
        assert "<|end|>" not in completion.text


def test_an_adapter_is_applied_to_its_own_requests_only(base: Path, engine: HfEngine, adapters: list[Path]) -> None:
    plain = HfEngine(str(base)).generate(requests(engine))
    for i in (0, 1):
        engine.load_adapter(f"a{i}", adapters[i])
    asked = [replace(r, adapter=(None, "a0", "a1")[i % 3]) for i, r in enumerate(requests(engine))]
    found = engine.generate(asked)
    from peft import PeftModel

    for i, (request, completion) in enumerate(zip(asked, found, strict=True)):
        if request.adapter is None:
            assert same([completion], [plain[i]])
        else:
            model = PeftModel.from_pretrained(
                load_base(str(base), "float32")[0], adapters[int(request.adapter[1])]
            ).eval()
            adapted = full_forward(model, request, completion)
            assert completion.log_probs == pytest.approx(adapted, abs=1e-5)
            bare = full_forward(load_base(str(base), "float32")[0], request, completion)
            assert max(abs(a - b) for a, b in zip(adapted, bare, strict=True)) > 0.1


def test_loaded_adapters_leave_the_base_untouched(base: Path, engine: HfEngine, adapters: list[Path]) -> None:
    fresh = HfEngine(str(base))
    before = fresh.generate(requests(engine))
    for i in range(3):
        fresh.load_adapter(f"a{i}", adapters[i])
        fresh.generate(requests(engine, 2, adapter=f"a{i}"))
    assert same(fresh.generate(requests(engine)), before)


def test_an_adapter_that_is_asked_for_again_outlives_the_ones_loaded_after_it(base: Path, adapters: list[Path]) -> None:
    """A stage names its policy first, then loads others; the policy, loaded long ago, must not be the one that goes."""
    fresh = HfEngine(str(base))
    for i in range(4):
        fresh.load_adapter(f"a{i}", adapters[i])
    fresh.load_adapter("a0", adapters[0])
    fresh.load_adapter("a4", adapters[4])
    fresh.generate(requests(fresh, 1, adapter="a0"))
    with pytest.raises(EngineUnavailable, match="'a1' was never loaded"):
        fresh.generate(requests(fresh, 1, adapter="a1"))


def test_a_name_that_is_loaded_from_another_folder_is_the_new_adapter(base: Path, adapters: list[Path]) -> None:
    """Even when it is the only one."""
    fresh, straight = HfEngine(str(base)), HfEngine(str(base))
    fresh.load_adapter("one", adapters[0])
    old = fresh.generate(requests(fresh, adapter="one"))
    fresh.load_adapter("one", adapters[1])
    straight.load_adapter("two", adapters[1])
    new = fresh.generate(requests(fresh, adapter="one"))
    assert same(new, straight.generate(requests(fresh, adapter="two")))
    assert not same(new, old)


def test_an_unknown_adapter_is_an_error_and_not_the_base(engine: HfEngine) -> None:
    with pytest.raises(EngineUnavailable, match="'nobody' was never loaded into this engine"):
        engine.generate(requests(engine, 1, adapter="nobody"))


def test_no_requests_are_no_completions(engine: HfEngine) -> None:
    assert engine.generate([]) == []


def test_broken_weights_are_an_error_and_not_text(base: Path) -> None:
    fresh = HfEngine(str(base))
    with torch.no_grad():
        fresh._base.get_output_embeddings().weight[0, 0] = float("nan")
    with pytest.raises(EngineUnavailable, match="not finite"):
        fresh.generate(requests(fresh, 2))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_frequencies_match_the_softmax(temperature: float) -> None:
    """20,000 draws over 12 tokens: chi-square below its 1 - 1e-6 quantile (11 degrees of freedom, 47.5).

    A sampler at another temperature, uniform, or greedy gives thousands.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.3 * ((5 * v) % 12) for v in range(12)])  # 0 to 3.3, not in order
    n = 20_000
    uniforms = torch.rand(n, generator=generator, dtype=torch.float64)
    drawn = sample(logits.expand(n, 12), torch.full((n, 1), temperature), uniforms)
    weights = [float(torch.exp(x.double() / temperature)) for x in logits]
    expected = [n * w / sum(weights) for w in weights]
    counts = [int((drawn == v).sum()) for v in range(12)]
    assert min(expected) > 5  # where the approximation holds
    assert sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True)) < chi2.ppf(1 - 1e-6, 11)


def test_temperature_0_takes_the_first_of_equals_whatever_is_drawn() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]]).expand(5, 4)
    assert sample(logits, torch.zeros(5, 1), torch.linspace(0, 0.99, 5, dtype=torch.float64)).tolist() == [1] * 5


def test_a_token_of_probability_0_is_never_drawn() -> None:
    logits = torch.tensor([[-1e9, 0.0, -1e9, 0.0, -1e9]] * 3)
    drawn = sample(logits, torch.ones(3, 1), torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert drawn.tolist() == [1, 3, 3]


def test_encode_ends_where_the_reply_begins_and_decode_is_its_inverse(engine: HfEngine) -> None:
    prompt = engine.encode(CHATS[2])
    assert engine.decode(prompt) == "fail. Action: check photo photo done."
    assert engine.encode([*CHATS[2], {"role": "assistant", "content": "pass."}])[: len(prompt)] == prompt


def test_model_hash_changes_with_weights_and_tokenizer_and_not_with_other_files(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(base, folder)
    before = model_hash(str(base))
    assert model_hash(str(folder)) == before
    (folder / "notes.md").write_text("more")
    assert model_hash(str(folder)) == before
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        file = folder / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert model_hash(str(folder)) != before
        file.write_bytes(content)
    assert model_hash("some/hub-name") != model_hash("some/other-name")


def broken(base: Path, folder: Path, name: str, content: bytes) -> Path:
    shutil.copytree(base, folder)
    (folder / name).write_bytes(content)
    return folder


def test_a_missing_or_broken_base_is_one_sentence(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    weights = (base / "model.safetensors").read_bytes()
    config = (base / "config.json").read_bytes()
    folders = [
        tmp_path / "nowhere",
        tmp_path / "empty",
        Path(
            "data/base"
        ),  # shaped like a hub name, but its parent is a folder here: nothing is looked for in the network
        broken(base, tmp_path / "cut", "model.safetensors", weights[:100]),
        broken(base, tmp_path / "garbled", "config.json", b"{"),
        broken(base, tmp_path / "misfit", "config.json", config.replace(b'"hidden_size": 16', b'"hidden_size": 32')),
        broken(base, tmp_path / "wordless", "tokenizer.json", b"words"),
    ]
    for folder in folders:
        with pytest.raises(UsageError, match=r"^model.path: ") as caught:
            load_base(str(folder), "float32")
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


def copy_of(base: Path, folder: Path, **changes: Any) -> tuple[Path, dict[str, Any]]:
    """The model's folder with another config.json, and its tensors."""
    from safetensors.torch import load_file

    shutil.copytree(base, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return folder, load_file(folder / "model.safetensors")


def saved(folder: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tensor_that_the_file_lacks_is_not_made_up(base: Path, tmp_path: Path) -> None:
    folder, tensors = copy_of(base, tmp_path / "cut")
    name = next(name for name in tensors if "mlp" in name)
    saved(folder, {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(
        UsageError, match=rf"^model.path: {name} is missing in the weights at .*cut'; give a folder whose"
    ):
        HfEngine(str(folder))


def test_more_layers_in_the_config_than_in_the_file_are_refused(base: Path, tmp_path: Path) -> None:
    layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    folder, _ = copy_of(base, tmp_path / "deep", num_hidden_layers=layers + 1)
    with pytest.raises(UsageError, match=rf"model.layers.{layers}\S+ is missing in the weights at .*deep' \(8 more\)"):
        HfEngine(str(folder))


def test_a_tensor_that_the_model_has_no_place_for_is_refused(base: Path, tmp_path: Path) -> None:
    folder, tensors = copy_of(base, tmp_path / "more")
    saved(folder, tensors | {"extra.weight": torch.zeros(3)})
    with pytest.raises(
        UsageError, match=r"^model.path: extra.weight has no place in the model, and stands in the weights"
    ):
        HfEngine(str(folder))
