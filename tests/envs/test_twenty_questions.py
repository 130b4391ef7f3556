"""20 Questions: what wins, when the game ends, what is answered, and how well was asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stages import envs
from stages.envs.objects import Item, Names, cut_table, own_table
from stages.envs.oracle import rule_oracle
from stages.frame.types import (
    Completion,
    EngineUnavailable,
    Env,
    Episode,
    Malformed,
    Message,
    Outcome,
    Scenario,
    SimulatorError,
    Step,
    Turn,
    UsageError,
)


def play(target: str, *, ask: object = None, **options: object) -> Env:
    env = envs.make_env("twenty_questions", options, ask)()  # type: ignore[arg-type]
    env.reset(Scenario("twenty_questions", "test", target, {"object": target}))
    return env


def question(env: Env, text: str) -> Step:
    return env.step({"role": "assistant", "content": f"Thought: let me see.\nAction: {text}"})


def said(step: Step) -> str:
    return str(step.messages[0]["content"])


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("cat", "Is it a cat?"),
        ("cat", "Is it a CAT?"),
        ("cat", "is it a cat"),
        ("cat", "Are they cats?"),
        ("cat", "Is it a kitten?"),
        ("bread", "Is it a loaf of bread?"),
        ("mouse", "Is it one of those mice?"),
        ("knife", "Are they knives?"),
        ("shirt", "Is it a T-shirt?"),
        ("sofa", "Could it be a couch?"),
        ("ice cream", "Is it ice-cream?"),
        ("ice cream", "Is it an icecream?"),
        ("box", "Is it one of many boxes?"),
        ("phone", "Is it a cell phone?"),
        ("butterfly", "Is it one of the butterflies?"),
        ("butterfly", "Is it one of the butter-flies?"),
        ("butterfly", "Is it a butter fly?"),
        ("ice cream", "Is it an ice-cream?"),
        ("cat", "Is it bigger than a cat?"),  # the source's rule: naming is enough
    ],
)
def test_naming_the_object_wins(target: str, text: str) -> None:
    step = question(play(target), text)
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)
    assert "You win" in said(step)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("bread", "Is it smaller than a breadbox?"),
        ("bat", "Is it Batman?"),
        ("bat", "Does it need a battery?"),
        ("cat", "Is it in a category of its own?"),
        ("cat", "Is it a caterpillar?"),
        ("ant", "Is it an antelope?"),
        ("car", "Is it a carpet?"),
        ("pen", "Is it a pencil?"),
        ("ring", "Is it a string?"),
        ("key", "Is it a monkey?"),
        ("egg", "Is it an eggplant?"),
        ("box", "Is it a boxer?"),
        ("pan", "Is it a panda?"),
    ],
)
def test_a_name_inside_another_word_does_not_win(target: str, text: str) -> None:
    step = question(play(target), text)
    assert (step.reward, step.terminated) == (0.0, False)


def test_a_name_s_letters_in_other_words_do_not_name_it() -> None:
    names = Names([Item(name) for name in ("acorn", "carpet", "island", "forklift", "cactus", "necktie")])
    for text in (
        "Is it a corn?",
        "Is it a car, pet or toy?",
        "Is it a car; pet?",
        "Can you say what it is land or sea?",
        "Is it made for k?",
        "Is it a car, a pet?",
        "Is it a neck?",
    ):
        assert names.mentioned(text) == names.guessed(text) == set(), text
    for name, text in (("carpet", "Is it a car pet?"), ("necktie", "neck-tie"), ("forklift", "Is it a fork lift?")):
        assert names.mentioned(text) == names.guessed(text) == {name}
    assert Names([Item("merry-go-round")]).guessed("Is it a merrygo round?") == {"merry-go-round"}


@pytest.mark.parametrize(
    ("target", "text"), [("toothbrush", "Is it a tooth brush?"), ("goldfish", "Are they gold fishes?")]
)
def test_a_name_of_one_word_written_as_two_wins_the_game(target: str, text: str) -> None:
    assert question(play(target), text).reward == question(play(target, win="guess"), text).reward == 1.0
    assert question(play("cat"), text).reward == 0.0


def test_the_longer_name_is_meant_where_two_overlap() -> None:
    names = Names([Item("ball"), Item("soccer ball"), Item("car"), Item("toy car")])
    assert names.mentioned("Is it a soccer ball?") == {"soccer ball"}
    assert names.mentioned("Is it a ball, or a soccerball?") == {"ball", "soccer ball"}
    assert names.mentioned("Is it bigger than a toy car or two cars?") == {"car", "toy car"}


@pytest.mark.parametrize(("text", "wins"), [
    ("Is it a cat?", True), ("So, my final guess is: the cat!", True), ("Are they cats?", True), ("I think it's a kitten", True),
    ("Is it a kind of cat?", True), ("Is it bigger than a cat?", False), ("Is it a dog, a cat or a cow?", False), ("Is it cat food?", False),
])  # fmt: skip
def test_only_a_guess_wins_where_the_option_says_so(text: str, wins: bool) -> None:
    step = question(play("cat", win="guess"), text)
    assert (step.reward == 1.0) is wins


def test_the_last_question_ends_the_game_without_reward() -> None:
    env = play("cat", questions=2)
    assert said(question(env, "Is it alive?")) == "Yes. 1 question left."
    step = question(env, "Is it metal?")
    assert (step.reward, step.terminated, step.truncated) == (0.0, True, False)
    assert said(step) == "No. No questions left. You lose."
    with pytest.raises(RuntimeError, match="reset"):
        question(env, "Is it a cat?")


def test_the_last_question_can_win_and_a_win_ends_the_game() -> None:
    env = play("cat", questions=1)
    assert question(env, "Is it a cat?").reward == 1.0
    with pytest.raises(RuntimeError, match="reset"):
        question(env, "Is it a cat?")


def test_the_object_is_told_at_the_end_only_where_the_option_says_so() -> None:
    assert "cat" not in said(question(play("cat", questions=1), "Is it metal?"))
    assert "It was cat." in said(question(play("cat", questions=1, reveal=True), "Is it metal?"))


def test_only_the_first_question_of_a_reply_counts() -> None:
    env = play("cat")
    step = question(env, "Is it metal? Is it a cat?\nIs it a cat?")
    assert (step.reward, said(step)) == (0.0, "No. 19 questions left.")
    assert question(env, "I wonder.\nIs it a cat?").reward == 1.0


def test_unreadable_reply_uses_up_no_question() -> None:
    env = play("cat", questions=1)
    for content in ("", "Is it a cat?", "Thought: hm", "Action:", "Action: ?!", None):
        with pytest.raises(Malformed):
            env.step({"role": "assistant", "content": content})
    assert question(env, "Is it a cat?").reward == 1.0


def test_what_the_rule_cannot_answer_costs_a_question() -> None:
    assert said(question(play("cat"), "What is it?")) == "I cannot answer that with yes or no. 19 questions left."


def test_every_object_can_be_found_in_twenty_questions() -> None:
    """Halving by the attributes that split best, then guessing, wins every game: the task is solvable as it stands."""
    table, answer = own_table(), rule_oracle(own_table())
    for target in table.items:
        env, left, asked = play(target), dict(table.items), 0
        while True:
            asked += 1
            best = min(
                table.attributes,
                key=lambda name: abs(2 * sum(name in item.attributes for item in left.values()) - len(left)),
            )
            if len(left) > 2:
                holds = answer(target, f"Is it {table.attributes[best].yes[0]}?") == "yes"
                question(env, f"Is it {table.attributes[best].yes[0]}?")
                left = {name: item for name, item in left.items() if (best in item.attributes) == holds}
                continue
            guess = next(iter(left))
            left.pop(guess)
            if question(env, f"Is it a {guess}?").reward:
                break
        assert asked <= 20, target


def test_failed_oracle_is_no_answer_and_leaves_the_game_where_it_was() -> None:
    def down(messages: Sequence[Message]) -> str:
        raise EngineUnavailable("no server")

    env = play("cat", ask=down, questions=1)
    for _ in range(3):
        with pytest.raises(SimulatorError, match="no server"):
            question(env, "Is it alive?")
    assert question(env, "Is it a cat?").reward == 1.0  # naming is decided without the LLM


def test_oracle_is_shared_by_the_games_of_one_maker() -> None:
    asked: list[Sequence[Message]] = []

    def yes(messages: Sequence[Message], **sampling: object) -> str:
        asked.append(messages)
        return "Yes"

    make = envs.make_env("twenty_questions", {}, yes)
    for _ in range(3):
        env = make()
        env.reset(Scenario("twenty_questions", "train", "cat", {"object": "cat"}))
        assert said(question(env, "Is it alive?")).startswith("Yes.")
    assert len(asked) == 1


def test_csv_needs_an_oracle_and_its_variants_win(tmp_path: Path) -> None:
    path = tmp_path / "objects.csv"
    path.write_text("id,object,variants\n0,pants,pant; pair of pants\n1,Soccer ball,\n")
    with pytest.raises(UsageError, match=r"task\.oracle"):
        envs.make_env("twenty_questions", {"objects": str(path)})
    env = play("pants", ask=lambda messages: "No", objects=str(path))
    assert said(question(env, "Is it alive?")).startswith("No.")
    assert question(env, "Is it a pant?").reward == 1.0
    assert (
        question(play("Soccer ball", ask=lambda messages: "No", objects=str(path)), "Is it a soccer ball?").reward
        == 1.0
    )


def test_lmrl_gym_s_reward_is_minus_one_for_each_question_that_does_not_win() -> None:
    env = play("cat", reward="question", questions=3)
    assert [question(env, text).reward for text in ("Is it alive?", "Is it a dog?", "Is it a cat?")] == [
        -1.0,
        -1.0,
        0.0,
    ]
    env = play("cat", reward="question", questions=2)
    steps = [question(env, text) for text in ("Is it alive?", "Is it a dog?")]
    assert [step.reward for step in steps] == [-1.0, -1.0] and steps[-1].terminated


BRIEF = {"size": 48, "questions": 3, "brief": True}


def test_brief_says_the_same_in_few_words() -> None:
    env = play("knife", **BRIEF)
    assert env.system == "Find the object."
    told = [said(question(env, text)) for text in ("ask metal", "guess cat", "ask animal")]
    assert told == ["ask metal yes. 2 left.", "guess cat no. 1 left.", "ask animal no. lost."]
    env = play("knife", **BRIEF)
    step = question(env, "guess knife")
    assert (said(step), step.reward, step.terminated) == ("guess knife yes. won.", 1.0, True)
    assert said(question(play("knife", **BRIEF), "ask ask")) == "ask ask unclear. 2 left."


def episode_of(target: str, *actions: str) -> Episode:
    env = play(target, **BRIEF)
    turns = []
    for i, action in enumerate(actions):
        step = question(env, action)
        done = Completion("", (), (), "stop")
        turns.append(
            Turn(i, 2 + 2 * i, (), done, "", action, said(step), step.reward, step.terminated, False, False, 0.0)
        )
    scenario = Scenario("twenty_questions", "train", target, {"object": target})
    return Episode("e", scenario, None, Outcome.SCORED, (), tuple(turns), 0.0)


def test_how_well_was_asked_is_counted_by_the_table() -> None:
    """Of five questions by hand: animals are alive and cats fit them, a knife does not; a drum fits nothing that is known."""
    found = envs.describe(
        "twenty_questions",
        BRIEF,
        [episode_of("cat", "ask animal", "ask alive", "guess knife"), episode_of("dog", "ask mammal", "guess dog")],
    )
    animals = sum("animal" in item.attributes for item in cut_table(own_table(), 48).items.values())
    assert found == {"guesses": 2 / 5, "guess_fits": 1 / 2, "settled": 1 / 3, "open": animals}
    assert envs.describe("twenty_questions", BRIEF, []) == {}
