"""What is kept of runs: taken along, held against what was stored, deleted where nobody needs it, and made again.

`bundle/` has a run as a folder, `recompute/` works out again what a run stored.

Modules:

    export  rows, adapters, and merged models with or without their value head, to a folder
    garbage which weights are still needed, and which `turnwise gc` may delete
    remake  weights that were deleted, made again where a stage needs them
"""
