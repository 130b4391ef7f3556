"""What only looks at what was run: it reads what is stored, and makes no run.

`view/` has the page of runs and their episodes.

Modules:

    pages       HTML pages that need no other file
    traces      episodes as MLflow's traces
    certificate whether every turn's tokens stand in the state after it, and what differs where not
    ledger      what each turn of an episode earned and counted for in the loss
    explain     whether a stage would run again or be reused, and because of what
    compare     runs side by side
    sql         DuckDB's answer about the rows of the runs, with a relation of the runs to join them to
"""
