"""Flows chain stages into runs: presets, iterations, reruns and schedules. No learning, no SQL.

Runs are made here and in `orchestration/`. `cost/` estimates a run before it starts. `look/` only shows runs, `keep/`
keeps them in order, and `evidence/` compares many runs.

Modules:

    pipeline   the loop over iterations, the parent run with its curves, the choice of the best adapter
    registry   all stages, their order in a method, and the runs that each one reads
    parts      tasks, methods and models, the parts of a preset; and earlier names of presets
    presets    `RunConfig`, the config of a whole run: default, then preset, then `--set`
    misfits    says in one sentence what does not fit a config
    rerun      one stage again from its stored inputs
    workspace  opens a project folder: stores, engines, clean-up after dead processes
    shipped    what the wheel carries beside the code: models and studies
    report     progress on stderr, the table of iterations on stdout
    played     a run that learns from another run's episodes
    champion   the adapter that a preset's scheduled runs continue from, and when a better one replaces it
    branch     a pipeline run that leaves another one at a stage
    telling    what a run says of itself: name, summary, description, figures
    lineage    which stage runs made a run, as text and as a drawing
    datasets   the splits of a run as MLflow datasets
    locks      locks that end with their process: the device, a folder that is served
    book       the parent run of a pipeline: its curves and its summary, always up to date
"""
