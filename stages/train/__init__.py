"""Stored rows become batches, passes and losses; a model is opened for training.

Modules:

    rows           training rows: a prompt and a completion each, and where they come from
    passes         rows as steps, a step as passes, and the loss of a pass
    model          the model opened for training, and the config that every stage with a gradient has
    network        adapter, head and their target network; the loss of rows that a head reads
    on_policy      requirements of a policy gradient on its episodes
    history        metrics of passes, steps and stages: means, each weighed by what it counts
    step_metrics   metrics of values and advantages: of Self-AC's rows, and of a step from its rows
    actor_critic   the joint loss of Self-AC, GRPO and PPO: one pass, targets, advantages, both losses
    episode_steps  stored episodes to the packed rows of that loss
"""
