"""A page of runs and their episodes that needs no other file: `turnwise view`, and an artifact of each pipeline run.

Modules:

    verdicts  what became of an episode, and where the critic's word disagrees with it
    sources   the stage runs whose episodes are shown, and which of these where they are too many
    credit    what each turn of an episode earned and counted for, from the ledger of a run of self_ac
    tokens    token ids as the pieces of text that they are
    episodes  episodes with all that was said of their turns, and which tokens were trained on
    figures   what differs between runs, what they came to, their curves
    page      the page, written to a file
    keep      the page as an artifact of a pipeline run
"""
