"""What only looks at what was run: it reads what is stored, and makes no run.

`view/` has the page of runs and their episodes.

Modules:

    pages   HTML pages that need no other file
    traces  episodes as MLflow's traces
"""
