"""Shows what was run. It only reads what is stored, and makes no run.

`view/` has the page of runs and their episodes.

Modules:

    pages       HTML pages that need no other file
    traces      episodes as MLflow's traces
    certificate whether the next state holds every turn's tokens, and what differs if not
    ledger      the credit of each turn of an episode and its share of the loss
    explain     whether a stage would run again or be reused, and why
    compare     runs side by side
    sql         queries the rows of the runs in DuckDB; the relation `runs` joins them to their runs
"""
