"""Shows what was run. It only reads what is stored, and makes no run.

`view/` has the page of runs and their episodes.
"""
