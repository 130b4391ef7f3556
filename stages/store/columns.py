"""The meaning of every table and column of `tables.py`. docs/reference/tables.md is made from it."""

from __future__ import annotations

from collections.abc import Mapping

SHARED: Mapping[str, str] = {
    "run_id": "the stage run that wrote the row",
    "episode_id": "the episode",
    "turn": "number of the turn in its episode, from 0",
    "state_len": "messages before the action",
}
"""Columns that mean the same in every table that has them."""

WHAT: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "commits": (
        "One row for each stage run that wrote its rows.",
        {
            "stage": "its stage",
            "committed_at": "when, in UTC",
            "n_rows": "rows that it wrote, by table",
        },
    ),
    "episodes": (
        "One row for each episode. Written by `collect` and `evaluate`.",
        {
            "iteration": "iteration of the run that played it; -1 for the base model",
            "task": "the environment",
            "split": "train, validation or test",
            "scenario_id": "the scenario",
            "scenario": "the data that the environment was reset with",
            "adapter": "the policy's adapter; null for the base model",
            "outcome": "scored, policy_failed, truncated, env_failed or simulator_failed",
            "total_reward": "sum of the rewards; the episode is won at 1 or more",
            "n_turns": "turns",
            "n_malformed": "replies that could not be read",
            "attempts": "tries until it was played to its end",
            "seconds": "wall time",
            "n_tokens": "tokens that the policy generated",
            "error": "what went wrong, or why it was cut",
            "messages": "the whole conversation",
        },
    ),
    "turns": (
        "One row for each turn of an episode. Written with `episodes`.",
        {
            "prompt_ids": "token ids that the policy was given",
            "action_ids": "token ids that it generated",
            "log_probs": "log-probability of each of them, at temperature 1",
            "text": "the reply as text",
            "thought": "the thought in it",
            "action": "the action in it",
            "observation": "what the environment answered",
            "reward": "reward of this turn",
            "terminated": "the environment ended the episode here",
            "truncated": "a limit cut the episode here",
            "malformed": "the reply could not be read",
            "seconds": "wall time",
        },
    ),
    "targets": (
        "One row for each thing to be learned. `targets` writes futures, `refine` and `pick` write actions, `q_critic` writes values.",
        {
            "target_id": "id of the row",
            "role": "what learns it: successor, policy or value",
            "terminal": "the transition ends its episode",
            "student_ids": "token ids of the prompt that is trained on",
            "completion_ids": "token ids that are learned",
            "teacher_ids": "token ids of the prompt with privileged knowledge, from which the text was made",
            "student_prompt": "the first as text",
            "teacher_prompt": "the last as messages, in JSON",
            "raw": "the text before it was corrected",
            "completion": "the text that is learned",
            "weight": "weight of the row in the loss",
            "info": "what else was used: a', f' and the reward; Q; or whether the action was kept",
        },
    ),
    "judgements": (
        "One row for each action that the critic judged. Written by `refine`, `pick` and the audit of `evaluate`.",
        {
            "action": "the reply that was judged",
            "futures": "the futures that the evaluator read",
            "critique": "what the evaluator wrote",
            "verdict": "yes, no or malformed",
            "refined": "the action that is learned instead; empty if there is none",
            "info": "why the row was dropped or refused, and other notes",
        },
    ),
    "priorities": (
        "One row for each transition that the critic trained on. Written by `critic` and `q_critic`.",
        {
            "loss": "its loss, by token: the priority of the transition",
            "step": "gradient step at which it was measured",
        },
    ),
    "certificates": (
        "One row for each turn that is trained with a ratio. Written by `self_ac` and `grpo`.",
        {
            "extended": "the next state begins with the turn's own tokens",
            "position": "first token that differs, counted from the start of the episode",
            "produced": "tokens around it as the engine produced them",
            "rendered": "tokens around it as the next state has them",
            "gap_mean": "mean difference of the log-probabilities of engine and trainer, in nats",
            "gap_max": "the largest difference",
        },
    ),
}
"""Table -> what a row is, and what its own columns hold."""
