"""Keeps runs in order: export, recomputation and comparison, deletion of unneeded weights, and their remake.

`bundle/` writes a run as a folder. `recompute/` recomputes what a run stored.
"""
