"""What each command does and shows. `flows/cli.py` reads the command line.

Modules:

    runs         the commands that run something or list what was run
    study        `turnwise study`: the runs of a comparison, and what they say together
    claims       `turnwise claims`: what the sources claim, and what is seen here
    show         `turnwise show`: a run, or an episode with futures, critiques and refinements beside its turns
    certificate  in `turnwise show EPISODE`: whether every turn's tokens stand in the state after it, and what differs where not
    ledger       `turnwise show RUN --ledger EPISODE`: what each turn of an episode earned and counted for in the loss
    dry_run      `--dry-run`: what would run, what would be reused
    gc           `turnwise gc`: weights that nobody needs any more
    describe     `turnwise stages`, from the stages themselves
    data         `turnwise data`: fetches a task's published data, lists what there is
    export       rows, adapters, and merged models with or without their value head, to a folder
"""
