"""What a run stored is worked out again from what its stages read, and compared: on any CPU, with no engine that
generates and no environment that is played.

Modules:

    run        the stages of a pipeline run in their order, and the first difference
    again      stages that are functions of what is stored: the whole stage once more
    episodes   collect and evaluate: what follows from the episodes as they were played
    drawn      targets, refine, pick and q_critic: what follows from the replies as they were drawn
    compare    what a stage run stored; two values, rows or files, and where they differ
    mute       the engine of a replay: the tokenizer alone
"""
