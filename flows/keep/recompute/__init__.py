"""Recomputes what a run stored from the inputs of its stages, and compares. It runs on any CPU, without an engine that
generates or an environment.

Modules:

    run        recomputes the stages of a pipeline run in order, and names the first difference
    again      stages that only read what is stored: the whole stage runs once more
    episodes   collect and evaluate: recomputed from the stored episodes
    drawn      targets, refine, pick and q_critic: recomputed from the stored replies
    compare    what a stage run stored; compares two values, rows or files
    mute       the engine of a replay: the tokenizer alone
"""
