"""A page of runs and their episodes in one file: `turnwise view`, and an artifact of each pipeline run.

Modules:

    verdicts  the outcome of an episode, and where the critic disagrees with it
    sources   the stage runs whose episodes are shown, and a choice where they are too many
    credit    each turn's reward and share of the loss, from the ledger of a run of self_ac
    tokens    token ids as pieces of text
    episodes  episodes with all judgements of their turns, and the tokens that were trained on
    figures   differences between runs, their results and curves
    page      the page, written to a file
    keep      the page as an artifact of a pipeline run
"""
