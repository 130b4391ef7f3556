"""Flows chain stages into runs: presets, iterations, reruns and schedules. No learning, no SQL.

What makes runs is here and in `orchestration/`; `cost/` tells beforehand what one takes. `look/` only looks at runs, `keep/` keeps them in
order, and `evidence/` says what many of them say.

Modules:

    pipeline   the loop over iterations, the parent run with its curves, the choice of the best adapter
    registry   which stages there are, their order in a method, and whose runs each one reads
    parts      tasks, methods and models: what a preset is put together of, and names of before
    presets    `RunConfig`, the config of a whole run: default, then preset, then `--set`
    misfits    what does not fit a config, in one sentence
    rerun      one stage again from its stored inputs
    workspace  opens a project folder: stores, engines, clean-up after dead processes
    shipped    what the wheel carries beside the code: models and studies
    report     progress on stderr, the table of iterations on stdout
    played     a run that learns from the episodes which another one played
    champion   what a preset's scheduled runs go on from, and when it is replaced
    branch     a pipeline run that leaves another one at a stage
    telling    what a run says of itself: name, summary, description, figures
    lineage    which stage runs made a run, as text and as a drawing
    datasets   the splits of a run as MLflow datasets
    locks      locks that end with their process: the device, a folder that is served
    book       the parent run of a pipeline: its curves and its summary, up to date at any moment
"""
