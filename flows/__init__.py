"""Flows chain stages into runs: presets, iterations, reruns and schedules. No learning, no SQL.

Runs are made here and in `orchestration/`. `cost/` estimates a run before it starts. `look/` only shows runs, `keep/`
keeps them in order, and `evidence/` compares many runs.
"""
