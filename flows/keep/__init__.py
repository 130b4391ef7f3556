"""Keeps runs in order: export, recomputation and comparison, deletion of unneeded weights, and their remake.

`bundle/` writes a run as a folder. `recompute/` recomputes what a run stored.

Modules:

    export  writes rows, adapters and merged models, with or without value head, to a folder
    garbage finds the weights that are still needed, and those that `turnwise gc` may delete
    remake  makes deleted weights again where a stage needs them
"""
