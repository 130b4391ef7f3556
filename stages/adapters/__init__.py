"""Environments of other libraries as ours, and ours as theirs. Each library is needed only when used. Ours.

Modules:

    gymnasium_text      Gymnasium's environments of texts, both ways; GEM's
    openenv_text        OpenEnv's environments by their client, and ours as one of its servers
    verifiers_env       verifiers' classic environments of several turns, both ways
    verifiers_rubric    their reward as the rubric gives it; a swallowed error raises
    verifiers_v1        verifiers' newer environments as ours
    verifiers_taskset   ours by verifiers' newer interface
    trl_env             ours for TRL's trainer
    play                an episode of ours as another library plays it; a failure has no reward
    asked               an endpoint whose replies come from whoever plays
    tool_text           tools listed in the system message, and called in a reply's action
"""
