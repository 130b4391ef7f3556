"""What stages rely on, asked of every engine: scripted, transformers, OpenAI-compatible (a stub here), and vLLM in
process and as a server.

The last two are skipped where vLLM is not installed; `make test-vllm` runs them. Log-probs are held against one plain
pass of transformers in fp32, tolerance 1e-4: kernels add up in other orders.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import BASE, CONTEXT, Subject, distributions, full_forward, save_adapters
from scipy.stats import chi2
from transformers import AutoTokenizer

from stages.frame.types import Completion, EngineUnavailable, Request, Streamer, UsageError, Wait
from stages.llm.roles import mix
from stages.llm.streams import once, stream

KINDS = ("scripted", "hf", "openai", "vllm", "server")
ATOL = 1e-4


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="session", params=KINDS)
def subject(request: pytest.FixtureRequest, engine_of: Callable[[str], Subject]) -> Subject:
    return engine_of(request.param)


@pytest.fixture
def model(subject: Subject) -> Subject:
    """An engine with a model behind it."""
    if not subject.has_model:
        pytest.skip("the scripted engine has no model")
    return subject


def requests(subject: Subject, n: int = 12, **changes: Any) -> list[Request]:
    """Of different prompts, lengths, temperatures and seeds, one of them greedy."""
    return [replace(Request(subject.chat(i), 4 + i % 9, 0.25 * (i % 7), 1000 + i), **changes) for i in range(n)]


def same(one: Sequence[Completion], other: Sequence[Completion]) -> bool:
    pairs = list(zip(one, other, strict=True))
    ids = all((a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason) for a, b in pairs)
    return ids and all(a.log_probs == pytest.approx(b.log_probs, abs=ATOL) for a, b in pairs)


def gap(asked: Sequence[Request], found: Sequence[Completion], adapter: Path | None = None) -> float:
    """Largest difference of a log-prob from transformers' plain pass."""
    expected = full_forward(adapter, list(zip(asked, found, strict=True)))
    return max(
        abs(a - b) for row, done in zip(expected, found, strict=True) for a, b in zip(row, done.log_probs, strict=True)
    )


def stop_token(subject: Subject) -> int:
    from stages.llm.scripted import END_ID

    return int(AutoTokenizer.from_pretrained(BASE).eos_token_id) if subject.has_model else END_ID


def test_a_completion_has_one_finite_log_prob_a_token_and_the_text_of_its_ids(subject: Subject) -> None:
    asked = requests(subject, max_tokens=40, temperature=2.0)
    for done in subject.engine.generate(asked):
        assert isinstance(done.token_ids, tuple) and all(type(token) is int and token >= 0 for token in done.token_ids)
        assert isinstance(done.log_probs, tuple) and all(
            type(p) is float and math.isfinite(p) and p <= 0 for p in done.log_probs
        )
        assert len(done.token_ids) == len(done.log_probs) > 0
        assert done.finish_reason in ("stop", "length")
        said = done.token_ids[:-1] if done.finish_reason == "stop" else done.token_ids
        assert done.text == subject.engine.decode(said)


def test_a_prompt_that_was_read_before_is_not_read_again_where_the_engine_says_so(subject: Subject) -> None:
    """Several replies of one prompt are requests of their own, sent together: all but the first find it read."""
    prompt = (subject.chat(3) * 40)[:200]
    together = subject.engine.generate([Request(prompt, 2, 1.0, seed) for seed in range(4)])
    again = subject.engine.generate([Request(prompt, 2, 1.0, 4)])
    found = [done.cached for done in (*together, *again)]
    if subject.kind in ("vllm", "server"):
        known = [n is not None and 100 < n < 200 for n in found]
        assert known[-1] and sum(known[:-1]) >= 3, found  # which of the four a server reads first is open
    else:
        assert found == [None] * 5


def test_a_reply_ends_with_the_end_of_turn_token_exactly_where_it_stopped(subject: Subject) -> None:
    end = stop_token(subject)
    found = subject.engine.generate([Request(subject.chat(i), 120 if i % 2 else 3, 1.0, i) for i in range(24)])
    assert {done.finish_reason for done in found} == {"stop", "length"}
    for done in found:
        assert end not in done.token_ids[:-1]
        assert (done.token_ids[-1] == end) == (done.finish_reason == "stop")
        assert "<|end|>" not in done.text


def test_max_tokens_is_each_request_s_own(subject: Subject) -> None:
    wanted = (1, 2, 5, 9)
    found = subject.engine.generate([Request(subject.chat(0), n, 1.0, n) for n in wanted])
    for n, done in zip(wanted, found, strict=True):
        assert len(done.token_ids) <= n
        assert len(done.token_ids) == n or done.finish_reason == "stop"
    assert found[0].finish_reason == "length"


def test_the_seed_decides_and_neither_order_nor_size_of_the_batch(subject: Subject) -> None:
    """Up to rounding: a draw on an edge, or a greedy tie, may fall the other way; none of these does."""
    asked = requests(subject)
    found = subject.engine.generate(asked)
    assert same(subject.engine.generate(asked), found)
    assert same(subject.engine.generate(asked[::-1])[::-1], found)
    assert same([subject.engine.generate([one])[0] for one in asked], found)
    # As hot as vLLM takes, after what begins no sentence that the model knows; seeds up to the largest that `mix` gives.
    stammer = asked[0].prompt_ids[5:6] * 30
    hot = subject.engine.generate([Request(stammer, 40, 2.0, seed) for seed in (*range(8), 2**63 - 1)])
    assert len({done.token_ids for done in hot}) == 9


def test_temperature_0_is_greedy_whatever_the_seed(subject: Subject) -> None:
    found = subject.engine.generate([Request(subject.chat(i), 8, 0.0, seed) for i in range(6) for seed in (1, 2)])
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert one.token_ids == other.token_ids
    if subject.has_model:
        asked = [Request(subject.chat(i), 8, 0.0, 0) for i in range(6)]
        for done, best in zip(
            found[::2], full_forward(None, list(zip(asked, found[::2], strict=True)), best=True), strict=True
        ):
            assert done.log_probs == pytest.approx(best, abs=ATOL)


def test_log_probs_are_those_of_transformers_untempered(model: Subject) -> None:
    """Seen with vLLM: up to 8e-6. Tempered ones would be off by tenths."""
    asked = requests(model, 14, max_tokens=24)
    assert {r.temperature for r in asked} >= {0.0, 0.5, 1.5}
    assert gap(asked, model.engine.generate(asked)) < ATOL


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_draws_have_the_softmax_s_frequencies_and_do_not_depend_on_the_last_one(
    model: Subject, temperature: float, tmp_path: Path
) -> None:
    """Where in its distribution a token lies, by the sum of what stands before it and a random share of its own, is
    uniform, as is the next one's.

    Neighbours in 6 by 6 cells, chi-square below its 1 - 1e-6 quantile, in two orders of the tokens: by number one
    random number that serves all tokens of a reply is found, the likeliest first another temperature.
    """
    (adapter,) = save_adapters(tmp_path, 1, spread=0.2)  # the base itself is too sure of most tokens
    model.engine.load_adapter("unsure", adapter)
    asked = [Request(model.chat(i % 40), 8, temperature, mix(7, i), "unsure") for i in range(600)]
    rng, cells = np.random.default_rng(0), np.zeros((2, 6, 6))
    for request, done in zip(asked, model.engine.generate(asked), strict=True):
        probs_TV = distributions(adapter, request, done, temperature).exp().numpy()
        own_T1 = np.take_along_axis(probs_TV, np.array(done.token_ids)[:, None], 1)
        earlier_TV = np.arange(probs_TV.shape[1]) < np.array(done.token_ids)[:, None]
        for order, before_TV in enumerate((earlier_TV, probs_TV > own_T1)):
            places = (probs_TV * before_TV).sum(1) + own_T1[:, 0] * rng.random(len(own_T1))
            for one, following in zip(
                places[::2], places[1::2], strict=False
            ):  # a reply of an odd number of tokens has one left over
                cells[order, min(int(6 * one), 5), min(int(6 * following), 5)] += 1
    expected = cells[0].sum() / 36
    assert expected > 20  # where the approximation holds
    assert (((cells - expected) ** 2 / expected).sum((1, 2)) < chi2.ppf(1 - 1e-6, 35)).all()


def test_an_adapter_is_applied_to_its_own_requests_only(model: Subject, adapters: list[Path]) -> None:
    """Two adapters and the base in one batch; then the base alone, as it was before."""
    asked = requests(model, max_tokens=12)
    before = model.engine.generate(asked)
    paths = {"own0": adapters[0], "own1": adapters[1]}
    for name, path in paths.items():
        model.engine.load_adapter(name, path)
    mixed = [replace(r, adapter=(None, "own0", "own1")[i % 3]) for i, r in enumerate(asked)]
    found = model.engine.generate(mixed)
    for i, used in enumerate((None, *paths.values())):
        assert gap(mixed[i::3], found[i::3], used) < ATOL
        if used is not None:
            assert gap(mixed[i::3], found[i::3]) > 0.1
    assert same(model.engine.generate(asked), before)


def test_a_name_that_is_loaded_from_another_folder_is_the_new_adapter(model: Subject, adapters: list[Path]) -> None:
    """Without a restart, and with nothing of the old one's left in a prefix cache."""
    asked = requests(model, max_tokens=12, adapter="hot")
    for path in (adapters[2], adapters[3], adapters[2]):
        model.engine.load_adapter("hot", path)
        model.engine.load_adapter("hot", path)  # idempotent
        assert gap(asked, model.engine.generate(asked), path) < ATOL


def test_more_adapters_than_are_kept_can_be_loaded_one_after_the_other(model: Subject, adapters: list[Path]) -> None:
    """Beside any of them the base stays the base; what is asked for again outlives what was loaded since."""
    for i, path in enumerate(adapters):
        model.engine.load_adapter(f"many{i}", path)
        model.engine.load_adapter("many0", adapters[0])
        asked = [
            replace(r, adapter=(None, f"many{i}", "many0")[k % 3])
            for k, r in enumerate(requests(model, 6, max_tokens=6))
        ]
        found = model.engine.generate(asked)
        for k, used in enumerate((None, path, adapters[0])):
            assert gap(asked[k::3], found[k::3], used) < ATOL


def test_an_unknown_adapter_is_an_error_and_not_the_base(subject: Subject) -> None:
    with pytest.raises(EngineUnavailable, match=r"'nobody' was never loaded into this engine"):
        subject.engine.generate(requests(subject, 1, adapter="nobody"))


def test_an_adapter_of_another_base_or_none_is_refused(model: Subject, adapters: list[Path], tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(adapters[0], foreign)
    (foreign / "base.json").write_text(json.dumps({"model_hash": "0" * 64}))
    with pytest.raises(UsageError, match="belongs to base model 000000000000"):
        model.engine.load_adapter("foreign", foreign)
    with pytest.raises(UsageError, match="wanted a LoRA adapter"):
        model.engine.load_adapter("none", tmp_path)
    with pytest.raises(EngineUnavailable, match="never loaded"):
        model.engine.generate(requests(model, 1, adapter="foreign"))


def test_64_requests_at_once_keep_their_order(subject: Subject) -> None:
    asked = requests(subject, 64, max_tokens=6)
    found = subject.engine.generate(asked)
    assert len(found) == 64
    if subject.has_model:
        assert gap(asked, found) < ATOL
    else:
        assert same(found, [subject.engine.generate([one])[0] for one in asked])


def test_a_stream_s_replies_are_those_of_one_call_and_requests_join_those_under_way(subject: Subject) -> None:
    asked, given = requests(subject, 24), list[Wait]()
    found: dict[int, Completion] = {}
    expected, left = subject.engine.generate(asked), list(enumerate(asked))

    def more(wait: Wait) -> Sequence[tuple[int, Request]] | None:
        if not left:
            return [] if wait == "none" else None
        given.append(wait)
        portion, left[:] = left[: len(given) % 4], left[len(given) % 4 :]  # of none, too
        return portion

    for ended in stream(subject.engine, more):
        assert ended and not found.keys() & dict(ended).keys()
        found.update(ended)
    assert same([found[i] for i in range(len(asked))], expected)
    assert set(given) == ({"some", "none"} if isinstance(subject.engine, Streamer) else {"all"})


def test_a_stream_that_is_closed_drops_the_rest_and_leaves_the_engine_usable(subject: Subject) -> None:
    asked = requests(subject)
    before = subject.engine.generate(asked)
    long = [Request(subject.chat(300 + i), 40 if i else 1, 2.0, i) for i in range(64)]
    with closing(stream(subject.engine, once(long))) as replies:
        assert any(0 in dict(ended) for ended in replies)  # maybe not the first: a server answers several at a time
    assert same(subject.engine.generate(asked), before)


def test_an_engine_may_be_asked_while_its_own_stream_goes_on(subject: Subject) -> None:
    """As by an environment whose oracle is the run's own engine."""
    asked, others = requests(subject, 8), requests(subject, 8, max_tokens=30)[::-1]
    found: dict[int, Completion] = {}
    expected, answers = subject.engine.generate(asked), subject.engine.generate(others)
    for ended in stream(subject.engine, once(asked)):
        for number, done in ended:
            found[number] = done
            assert same(subject.engine.generate([others[number]]), [answers[number]])
    assert same([found[i] for i in range(8)], expected)


def test_no_requests_are_no_completions(subject: Subject) -> None:
    assert subject.engine.generate([]) == []


def test_the_engine_tells_its_context(subject: Subject) -> None:
    assert subject.engine.context == (CONTEXT if subject.has_model else None)


def test_a_prompt_that_fills_the_context_is_one_sentence_that_says_what_to_lower(model: Subject) -> None:
    chat = model.chat(1)
    for length in (CONTEXT, 2 * CONTEXT):
        full = Request((chat * CONTEXT)[:length], 8, 1.0, 0)
        with pytest.raises(UsageError) as caught:
            model.engine.generate([*requests(model, 2), full])
        wanted = f"a prompt of {length} tokens leaves no room for a reply in the model's context of {CONTEXT}; lower task.max_turns or "
        assert str(caught.value).startswith(wanted + "roles.max_action_tokens")
    assert same(model.engine.generate(requests(model, 2)), model.engine.generate(requests(model, 2)))


def test_a_reply_that_fills_the_context_is_cut_there(model: Subject) -> None:
    chat = model.chat(1)
    left = 5
    asked = [Request((chat * CONTEXT)[: CONTEXT - left], 50, 0.5, seed) for seed in range(4)]
    found = model.engine.generate(asked)
    assert any(done.finish_reason == "length" and len(done.token_ids) == left for done in found)
    for done in found:
        assert len(done.token_ids) == left or done.finish_reason == "stop"
    assert gap(asked, found) < ATOL


@pytest.mark.parametrize("delay_s", [0.02, 0.2])
def test_ctrl_c_stops_at_once_and_leaves_the_engine_usable(
    model: Subject, adapters: list[Path], delay_s: float
) -> None:
    model.engine.load_adapter("kept", adapters[4])
    asked = [*requests(model, 6), *requests(model, 6, adapter="kept")]
    before = model.engine.generate(asked)
    # Far more than can be done in that time, on prompts that were never seen: what is half computed must not be found
    # in a cache afterwards.
    long = [
        Request((*model.chat(500 + i), *model.chat(700 + i)), 20, 2.0, i, "kept" if i % 2 else None)
        for i in range(1000)
    ]
    # ignored where the tests themselves run in the background
    before_signal = signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    # To the main thread, as a terminal's does: given to any other one, it would not wake this one up.
    pressed = threading.Timer(delay_s, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))

    def work() -> None:
        pressed.start()
        model.engine.generate(long)
        time.sleep(30)  # never: it would have been done too soon

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        pressed.cancel()
        signal.signal(signal.SIGINT, before_signal)
    assert time.monotonic() - began < 15
    assert same(model.engine.generate(asked), before)
    some = [replace(one, max_tokens=4) for one in long[:8]]
    found = model.engine.generate(some)
    assert gap(some[::2], found[::2]) < ATOL
    assert gap(some[1::2], found[1::2], adapters[4]) < ATOL


def test_encode_ends_where_the_reply_begins_as_transformers_does(model: Subject) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Service desk."},
        {"role": "user", "content": "Ana wants refund."},
    ]
    expected = AutoTokenizer.from_pretrained(BASE).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert model.engine.encode(messages) == tuple(expected)
    assert model.engine.decode(expected) == "Service desk. Ana wants refund."
