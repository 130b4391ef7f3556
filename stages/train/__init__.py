"""Stored rows become batches, passes and losses; a model is opened for training.

Modules:

    training       rows to batches, an adapter opened for training
    actor_critic   the joint loss of Self-AC, GRPO and PPO: one pass, targets, advantages, both losses
    episode_steps  stored episodes to the packed rows of that loss
"""
