"""Environments of other libraries as ours, and ours as theirs. None of those libraries is needed until it is used.
Ours.

Modules:

    gymnasium_text  Gymnasium's environments of texts, both ways
    verifiers_env   verifiers' classic environments of several turns, both ways
    trl_env         ours for TRL's trainer
    play            an episode of ours as another library plays it; a failure has no reward
"""
