"""Every step of turnwise is a stage, defined in frame/contract.py. docs/explanation/architecture.md has the picture.

Modules:

    collect   episodes with the current policy
    targets   the language Bellman backup
    critic    trains the successor (L1), moves the target network
    refine    judges fresh actions and rewrites them
    q_critic  a baseline of targets and critic: Q as a number
    pick      a baseline of refine: the best of several fresh actions
    distill   trains the policy on the rewritten or picked actions (L2)
    evaluate  win rate, forgetting probe, critic audit
    self_ac   Self-AC: trains actor and critic in one pass an episode
    rft       a baseline: supervised learning on won episodes
    grpo      a baseline: policy gradient with the group's mean as its baseline
    pretrain  makes the small base models that ship with the project
"""
