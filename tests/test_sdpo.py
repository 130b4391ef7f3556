"""SDPO: the loss against two plain passes a row, what the teacher reads and what the student never does, and its target."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import tau_small
import torch
from safetensors.torch import load_file
from shared_data import DATA, needs
from test_distill import averaged, watch

from stages import envs, sdpo
from stages.envs import tau_bench
from stages.envs.tau_bench import RESPOND
from stages.envs.tau_user import STOP
from stages.frame.contract import Config, Outputs
from stages.frame.sections import RolesConfig, TaskConfig
from stages.frame.types import Message, Outcome, Row, UsageError
from stages.learn.adapter import load_state, trainable_state
from stages.llm.roles import load_roles
from stages.llm.tokens import ChatTokenizer
from stages.play.transitions import episode_rows
from stages.sdpo import Pair, Part, SdpoConfig, distillation, step_parts, taught_turns, teacher_prompt, told
from stages.train.history import of_step
from stages.train.model import trainable

WON = [("Action: check photo", "photo done."), ("Action: close phone", "phone done. Mia audits: pass.")]
LOST = [("Action: check photo", "photo done."), ("Action: close email", "email done. Mia audits: fail. {wrong}")]
INPUTS = {"collect": ["collect0"]}
PLAIN = SdpoConfig()


def rows(bench: models.Bench, outcomes: Mapping[str, str]) -> dict[str, list[Row]]:
    """Episodes "Ana w", "Ana l", "Ana t": name -> won, lost or truncated. The first word is the scenario."""
    played = [
        models.make_episode(
            bench.engine, name, WON if how == "won" else LOST, Outcome.TRUNCATED if how == "cut" else Outcome.SCORED,
            reward=float(how == "won"),
        )
        for name, how in outcomes.items()
    ]  # fmt: skip
    found = episode_rows(played, 0)
    for head in found["episodes"]:
        head["scenario_id"] = head["episode_id"].split()[0]
    return found


@pytest.fixture
def bench(base: Path, tmp_path: Path) -> models.Bench:
    bench = models.Bench(base, tmp_path)
    outcomes = {"Ana a": "lost", "Ana b": "won", "Ana c": "lost", "Ben a": "won", "Ben b": "won", "Cleo a": "lost"}
    bench.memory.keep("collect0", Outputs({}, rows(bench, outcomes)))
    return bench


def pairs_of(bench: models.Bench, config: SdpoConfig = PLAIN) -> list[Pair]:
    context = bench.context(config, INPUTS)
    return taught_turns(context, load_roles(context.run.roles.prompts))[0]


def texts(bench: models.Bench, config: SdpoConfig = PLAIN) -> dict[tuple[Any, ...], str]:
    """The teacher's prompt of each turn."""
    return {pair.teacher.key: bench.engine.decode(pair.teacher.prompt_ids) for pair in pairs_of(bench, config)}


def run(bench: models.Bench, inputs: Any = INPUTS, name: str = "", **config: Any) -> Outputs:
    return bench.run(sdpo.STAGE, SdpoConfig(**config), inputs, name=name)


def weights(bench: models.Bench, name: str = "sdpo0", folder: str = "adapter") -> dict[str, torch.Tensor]:
    return dict(load_file(bench.memory.files[name, folder] / "adapter_model.safetensors"))


def slow_loss(
    model: Any, teacher: Any, pairs: Sequence[Pair], config: SdpoConfig, *, detached: bool = True
) -> torch.Tensor:
    """Each row through each model by itself, and the sums over the vocabulary written out."""

    def probs(net: Any, row: Any) -> torch.Tensor:
        found = net(input_ids=torch.tensor([list(row.ids)])).logits[0, len(row.prompt_ids) - 1 : -1]
        probabilities: torch.Tensor = found.softmax(1)
        return probabilities

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a / b).log()).sum()

    total, n = torch.zeros(()), 0
    for pair in pairs:
        p, q = probs(model, pair.student), probs(teacher, pair.teacher)
        q = q.detach() if detached else q
        if config.top_k:
            chosen = torch.zeros_like(p, dtype=torch.bool)
            for t in range(len(p)):
                for v in sorted(range(p.shape[1]), key=lambda v: -float(p[t, v].detach()))[: config.top_k]:
                    chosen[t, v] = True
            p, q = (torch.cat([x[chosen].view(len(x), -1), (x * ~chosen).sum(1, keepdim=True)], 1) for x in (p, q))
        m = (1 - config.mix) * p + config.mix * q
        both = (1 - config.mix) * kl(p, m) + config.mix * kl(q, m)
        total = total + {"reverse": kl(p, q), "forward": kl(q, p), "jensen_shannon": both}[config.divergence]
        n += len(pair.student.completion_ids)
    return total / n


def opened(bench: models.Bench) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """A model, the weights of a target that differs, and another model with these."""
    model = models.shake(trainable(bench.context(Config(), {}), None), 3, 0.1)
    other = models.shake(copy.deepcopy(model), 4, 0.1)
    return model, trainable_state(other), other


def gradient(model: Any, losses: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    total = 0.0
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def one_step(bench: models.Bench, pairs: Sequence[Pair], config: SdpoConfig) -> list[Part]:
    return next(step_parts(pairs, config, random.Random(0), "cpu"))


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
@pytest.mark.parametrize(
    "options",
    [{"ema_rate": 1}, {}, {"ema_rate": 1, "top_k": 3}, {"top_k": 3, "mix": 0.2}, {"ema_rate": 1, "pass_tokens": 300}],
    ids=str,
)
def test_loss_and_gradient_equal_two_plain_passes_a_row(
    bench: models.Bench, kind: Any, options: dict[str, Any]
) -> None:
    """One pass of both where the teacher is the policy itself; else the teacher's own pass, with its weights."""
    config = SdpoConfig(divergence=kind, batch=100, **options)
    model, target, other = opened(bench)
    pairs, own = pairs_of(bench, config), trainable_state(model)
    parts = one_step(bench, pairs, config)
    assert all((part.teacher is None) == (config.ema_rate == 1) for part in parts)
    assert (len(parts) > 1) == bool(config.pass_tokens)
    losses = [distillation(model, part, target, config) for part in parts]
    found, fast = gradient(model, [loss for loss, _ in losses])
    assert all(torch.equal(own[name], value) for name, value in trainable_state(model).items())
    teacher = model if config.ema_rate == 1 else other
    wanted, slow = gradient(model, [slow_loss(model, teacher, pairs, config)])
    assert found == pytest.approx(wanted, rel=1e-5) and wanted > 0.01
    assert torch.allclose(fast, slow, atol=1e-5 * float(slow.abs().max())) and float(slow.abs().max()) > 1e-3
    assert of_step([metrics for _, metrics in losses])["divergence"] == pytest.approx(wanted, rel=1e-5)


def test_only_the_student_is_moved(bench: models.Bench) -> None:
    """In the pass of both, what a teacher would get if it were not detached is another gradient."""
    config = SdpoConfig(ema_rate=1, batch=100)
    model, target, _ = opened(bench)
    pairs = pairs_of(bench, config)
    _, fast = gradient(model, [distillation(model, part, target, config)[0] for part in one_step(bench, pairs, config)])
    _, both = gradient(model, [slow_loss(model, model, pairs, config, detached=False)])
    assert not torch.allclose(fast, both, atol=0.1 * float(both.abs().max()))


def test_the_advantage_that_is_told_is_that_of_the_tokens_taken(bench: models.Bench) -> None:
    model, target, other = opened(bench)
    config, pairs, total, n = SdpoConfig(batch=100), pairs_of(bench), 0.0, 0
    for pair in pairs:
        for sign, net, row in ((1, other, pair.teacher), (-1, model, pair.student)):
            logits = net(input_ids=torch.tensor([list(row.ids)])).logits[0, len(row.prompt_ids) - 1 : -1]
            chosen = logits.log_softmax(1)[torch.arange(len(logits)), torch.tensor(list(row.completion_ids))]
            total += sign * float(chosen.detach().sum())
        n += len(pair.student.completion_ids)
    (part,) = one_step(bench, pairs, config)
    assert distillation(model, part, target, config)[1]["advantage"] == pytest.approx(total / n, rel=1e-4)


def test_the_student_reads_what_the_engine_read_and_both_predict_the_same_action(bench: models.Bench) -> None:
    turns = {(t["episode_id"], t["turn"]): t for t in bench.memory.rows("turns", ["collect0"])}
    pairs = pairs_of(bench)
    parts = one_step(bench, pairs, SdpoConfig(batch=100, ema_rate=1))
    seen = [row for part in parts for row in models.rows_of(part.student)]
    assert len(seen) == 2 * len(pairs) == 20
    for pair in pairs:
        turn = turns[pair.student.key]
        ids = tuple(turn["action_ids"])
        assert (tuple(turn["prompt_ids"]), ids) in seen and (tuple(pair.teacher.prompt_ids), ids) in seen
        assert tuple(turn["prompt_ids"]) != tuple(pair.teacher.prompt_ids)
        assert len(pair.whole.ids) == len(pair.teacher.ids) + len(pair.student.ids) - sum(
            1 for _ in shared(pair.student.prompt_ids, pair.teacher.prompt_ids)
        )


def shared(a: Sequence[int], b: Sequence[int]) -> Iterator[int]:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def test_a_lost_episode_is_told_its_end_and_what_won_and_a_won_one_only_what_else_won(bench: models.Bench) -> None:
    found = texts(bench)
    assert {key for key, _ in found} == {"Ana a", "Ana c", "Ben a", "Ben b", "Cleo a"}  # the only win of a group is not
    right, end = "Action: check photo\nAction: close phone", "email done. Mia audits: fail. {wrong}"
    for (name, _), text in found.items():
        assert (end in text.rsplit("<user>", 1)[-1]) == (name in ("Ana a", "Ana c", "Cleo a"))
        assert (right in text) == (name != "Cleo a")
        assert text.rstrip().endswith("Now give the right reply.\n<assistant>")
    first = found["Cleo a", 0]
    assert first.index("wants refund") < first.index("An earlier attempt failed")
    assert "photo done" not in first.split("An earlier attempt failed")[0]  # the state of the first turn has no reply
    assert found["Cleo a", 1].count("Action: check photo") == 1


def test_without_wins_only_lost_episodes_teach_and_without_feedback_only_what_won(bench: models.Bench) -> None:
    lost = {key for key, _ in texts(bench, SdpoConfig(wins="skip"))}
    assert lost == {"Ana a", "Ana c", "Cleo a"}
    assert not any("attempt at the same task" in text for text in texts(bench, SdpoConfig(wins="skip")).values())
    helped = texts(bench, SdpoConfig(feedback="none"))
    assert {key for key, _ in helped} == {"Ana a", "Ana c", "Ben a", "Ben b"}
    assert not any("An earlier attempt failed" in text for text in helped.values())
    assert not texts(bench, SdpoConfig(feedback="none", wins="skip"))


def test_told_by_turn_the_teacher_reads_what_followed_the_action(bench: models.Bench) -> None:
    found = texts(bench, SdpoConfig(feedback="turn", wins="skip"))
    assert found["Cleo a", 0].count("photo done.") == 1 and "email done" not in found["Cleo a", 0]
    assert "email done. Mia audits: fail. {wrong}" in found["Cleo a", 1]


def test_an_episode_that_was_cut_short_has_no_end_to_be_told_of(bench: models.Bench) -> None:
    bench.memory.keep("collect0", Outputs({}, rows(bench, {"Dan a": "cut"})))
    assert not texts(bench)
    assert len(texts(bench, SdpoConfig(feedback="turn"))) == 2


def test_only_the_newest_episodes_that_the_policy_answers_for_teach(bench: models.Bench) -> None:
    later = rows(bench, {"Eva a": "lost", "Gus a": "lost"})
    later["episodes"][1]["outcome"] = "env_failed"
    bench.memory.keep("collect1", Outputs({}, later))
    context = bench.context(PLAIN, {"collect": ["collect0", "collect1"]})
    pairs, counts = taught_turns(context, load_roles("service_desk"))
    assert {pair.student.key[0] for pair in pairs} == {"Eva a"}
    assert counts == {"sdpo/taught_frac": 0.5, "sdpo/out_of_context": 0.0}


def test_where_nothing_is_told_the_weights_go_out_as_they_came_in(bench: models.Bench) -> None:
    run(bench, lr=0.01)
    outputs = run(bench, INPUTS | {"sdpo": ["sdpo0"]}, "sdpo1", feedback="none", wins="skip")
    for folder in ("adapter", "target"):
        one, other = weights(bench, "sdpo0", folder), weights(bench, "sdpo1", folder)
        assert all(torch.equal(one[name], value) for name, value in other.items())
    assert outputs.metrics == {"sdpo/steps": 0.0, "sdpo/taught_frac": 0.0, "sdpo/out_of_context": 0.0}


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_the_target_follows_every_step(bench: models.Bench, monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    run(bench, lr=0.01, batch=3)
    states = watch(monkeypatch)
    run(bench, INPUTS | {"sdpo": ["sdpo0"]}, "sdpo1", lr=0.01, batch=3, epochs=2, ema_rate=rate)
    assert len(states) == 8
    expected = averaged(weights(bench, "sdpo0", "target"), states, rate)
    found = weights(bench, "sdpo1", "target")
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in expected.items())
    ended = weights(bench, "sdpo1")
    assert (rate == 1.0) == all(torch.allclose(found[name], value, atol=1e-7) for name, value in ended.items())


def test_passes_of_a_stage_are_the_whole_steps(bench: models.Bench) -> None:
    for rate in (0.05, 1.0):
        options: dict[str, Any] = {"lr": 0.01, "batch": 5, "ema_rate": rate}
        one, many = run(bench, **options).metrics, run(bench, pass_tokens=400, **options).metrics
        same = [name for name in one if "/tokens" not in name]
        assert [many[name] for name in same] == pytest.approx([one[name] for name in same], rel=1e-3)
    assert many["sdpo/tokens"] > one["sdpo/tokens"]  # less is shared


def test_layers_that_are_worked_out_again_change_nothing(bench: models.Bench) -> None:
    for rate in (0.05, 1.0):
        bench.checkpointing = False
        plain = run(bench, lr=0.01, ema_rate=rate).metrics
        bench.checkpointing = True
        assert dict(run(bench, lr=0.01, ema_rate=rate).metrics) == pytest.approx(dict(plain), rel=1e-4)


def test_the_same_seed_gives_the_same_bits(bench: models.Bench) -> None:
    run(bench, lr=0.01, batch=4)
    one = weights(bench)
    run(bench, lr=0.01, batch=4)
    assert all(torch.equal(one[name], value) for name, value in weights(bench).items())


def test_it_comes_near_to_its_teacher_and_not_without_steps(bench: models.Bench) -> None:
    """The teacher stands still. From above 1 nat a token, which a rate of 1e-12 leaves, to below half of that."""
    stuck = run(bench, lr=1e-12, epochs=20, ema_rate=0).metrics["sdpo/divergence"]
    found = run(bench, lr=0.02, epochs=20, ema_rate=0).metrics["sdpo/divergence"]
    assert stuck > 1 and found < 0.5 * stuck


def test_a_prompt_without_room_is_dropped_and_counted_and_none_left_is_an_error(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(len(pair.teacher.ids) for pair in pairs_of(bench))
    engine: Any = bench.engine
    monkeypatch.setattr(type(engine), "context", property(lambda self: longest - 1), raising=False)
    assert 0 < run(bench).metrics["sdpo/out_of_context"] < 10
    monkeypatch.setattr(type(engine), "context", property(lambda self: 10), raising=False)
    with pytest.raises(UsageError, match=r"sdpo: 10 of 10 rows have a prompt that leaves no room"):
        run(bench)


def test_with_history_as_text_the_last_message_is_made_longer(bench: models.Bench) -> None:
    roles = replace(load_roles("service_desk"), history="text")
    messages: list[Message] = [{"role": "system", "content": "Desk."}, {"role": "user", "content": "Hello."}]
    prompt = teacher_prompt(roles, {"state_len": 2}, messages, "What {was} said.", PLAIN)
    assert [str(m["content"]) for m in prompt][-1] == "Hello.\n\nWhat {was} said." and len(prompt) == 2


def test_the_refiner_s_prompt_holds_the_action_and_the_words_as_its_evaluation(bench: models.Bench) -> None:
    config = SdpoConfig(teacher="refiner", feedback_intro="Optimality: No.", request="", wins="skip")
    found = texts(bench, config)["Cleo a", 1]
    said = "Optimality: No.\nemail done. Mia audits: fail. {wrong}"
    wanted = load_roles("service_desk").words("refiner", action="close email", thought="", evaluation=said)
    assert models.words_of(found) == wanted
    bench.roles = RolesConfig(prompts="wiki_search")
    with pytest.raises(
        UsageError, match=r'sdpo.teacher: the prompts wiki_search lack refiner.md; add it, or set "mess'
    ):
        run(bench, teacher="refiner")


@pytest.mark.parametrize("audit", ["rule", "fault", "count", "verdict", "consequence"])
def test_the_embedded_model_knows_every_word_that_its_preset_s_teacher_reads(audit: str) -> None:
    from flows import presets
    from stages.envs import service_desk

    run: Any = presets.load("desk+sdpo")
    options, chat = {"audit": audit}, ChatTokenizer(run.model.path)
    roles = load_roles(run.roles.prompts)
    for scenario in envs.scenarios("service_desk", options, "train", 8, 0):
        env = service_desk.make(options)()
        messages: list[Message] = [{"role": "system", "content": env.system}, *env.reset(scenario)]
        turns: list[Row] = []
        for tool, _, choices in service_desk.steps_of(service_desk.Options(**options)):
            action = f"{tool} {choices[0]}"
            step = env.step({"role": "assistant", "content": f"Thought: {action}. Action: {action}"})
            turns.append({
                "episode_id": "e", "turn": len(turns), "state_len": len(messages), "action": action, "thought": "",
                "observation": step.messages[-1]["content"], "terminated": step.terminated,
            })  # fmt: skip
            messages += [{"role": "assistant", "content": f"Thought: {action}. Action: {action}"}, *step.messages]
        head = {"episode_id": "e", "scenario_id": "s", "total_reward": step.reward, "messages": messages}
        known = told([head], turns, run.sdpo)
        assert bool(known) == (step.reward < 1)
        for turn in turns if known else ():
            text = known["e", turn["turn"]]
            ids = chat.encode(teacher_prompt(roles, turn, messages, text, run.sdpo))
            assert chat.tokenizer.unk_token_id not in ids
            assert text.endswith(turns[-1]["observation"])


def play_tau(path: str, replies: Sequence[str], name: str, reward: float) -> tuple[Row, list[Row]]:
    """An episode of tau_bench's first training task, whose customer leaves at the last reply."""
    says = iter(["I need help with my order.", *["Go on {please}."] * (len(replies) - 1), f"Thanks. {STOP}"])
    env = tau_bench.make({"path": path}, lambda messages, **sampling: next(says))()
    scenario = envs.scenarios("tau_bench", {"path": path}, "train", 1, 0)[0]
    messages: list[Message] = [{"role": "system", "content": env.system}, *env.reset(scenario)]
    turns: list[Row] = []
    for said in replies:
        reply = f"Thought: {said}\nAction: {json.dumps({'name': RESPOND, 'arguments': {'content': said}})}"
        step = env.step({"role": "assistant", "content": reply})
        turns.append({
            "episode_id": name, "turn": len(turns), "state_len": len(messages), "action": said, "thought": "",
            "observation": step.messages[-1]["content"], "terminated": step.terminated,
        })  # fmt: skip
        messages += [{"role": "assistant", "content": reply}, *step.messages]
    return {"episode_id": name, "scenario_id": scenario.id, "total_reward": reward, "messages": messages}, turns


def check_tau(path: str) -> None:
    """A lost and a won episode of one task."""
    lost, of_lost = play_tau(path, ["Who are you?", "I cannot {help}."], "lost", 0.0)
    won, of_won = play_tau(path, ["Who are you?", "It is done."], "won", 1.0)
    roles, known = load_roles("tau_bench"), told([lost, won], [*of_lost, *of_won], PLAIN)
    assert set(known) == {("lost", 0), ("lost", 1)}
    for turn in of_lost:
        state = lost["messages"][: turn["state_len"]]
        prompt = teacher_prompt(roles, turn, lost["messages"], known["lost", turn["turn"]], PLAIN)
        assert prompt[:-1] == roles.policy(state) and prompt[-1]["role"] == "user"
        text = str(prompt[-1]["content"])
        # What won, word for word with its JSON, then how the lost episode ended, then what to do.
        assert json.dumps({"name": RESPOND, "arguments": {"content": "It is done."}}) in text
        assert text.index("It is done.") < text.index(f"Thanks. {STOP}") < text.index("Now give the right reply.")
        assert "I cannot {help}" not in text
        assert ("Go on {please}." in str(prompt[-2]["content"])) == (turn["turn"] == 1)
    refining = SdpoConfig(teacher="refiner", wins="skip")
    said = told([lost, won], [*of_lost, *of_won], refining)["lost", 1]
    words = str(teacher_prompt(roles, of_lost[1], lost["messages"], said, refining)[-1]["content"])
    assert f"Evaluation of this action:\n{said}" in words and "I cannot {help}." in words


def test_the_prompts_of_a_tau_bench_in_miniature(tmp_path: Path) -> None:
    check_tau(tau_small.write(tmp_path))


@needs(DATA / "tau_bench")
def test_the_prompts_of_tau_bench() -> None:
    check_tau(str(DATA / "tau_bench"))


def test_a_target_that_is_loaded_again_teaches_as_it_did(bench: models.Bench) -> None:
    """The next iteration's first loss is that of the policy and the target which this one left."""
    run(bench, lr=0.02, batch=3, epochs=2)
    found = run(bench, INPUTS | {"sdpo": ["sdpo0"]}, "sdpo1", lr=1e-12, batch=100).metrics["sdpo/loss_first"]
    bench.task = TaskConfig(options={"requests": 2, "tiers": 2})
    model = trainable(bench.context(Config(), {}), bench.memory.files["sdpo0", "adapter"])
    teacher = trainable(bench.context(Config(), {}), bench.memory.files["sdpo0", "target"])
    wanted = float(slow_loss(model, teacher, pairs_of(bench), PLAIN).detach())
    assert found == pytest.approx(wanted, rel=1e-5)
    load_state(teacher, trainable_state(model))
    assert wanted != pytest.approx(float(slow_loss(model, teacher, pairs_of(bench), PLAIN).detach()), rel=1e-4)
