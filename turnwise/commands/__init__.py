"""The work and the output of each command. `turnwise/arguments` has its arguments.

Modules:

    runs         the commands that run something or list what was run
    study        `turnwise study`: the runs of a comparison, and what they say together
    claims       `turnwise claims`: the sources' claims, and the results here
    show         `turnwise show`: a run, or an episode with the futures, critiques and refinements of its turns
    listed       in `turnwise show RUN`: its episodes, by outcome and by the critic's mistakes
    view         `turnwise view`: one or two runs as a page in one file
    due          `turnwise run` with --due: the scheduled run of that time
    dry_run      `--dry-run`: the stages that would run or be reused
    explain      `turnwise explain`: whether a stage would run again or be reused, and why
    lineage      `turnwise lineage`: the stage runs that made a run
    presets      `turnwise presets`: the tasks, methods and models, a line each
    sweep        `turnwise run` with --seeds or lists of values in --set: all combinations, as a study
    compare      `turnwise compare`: runs side by side
    plan         `turnwise plan`: the cost of a run before it starts
    sql          `turnwise sql`: DuckDB's answer about the rows of the runs
    check        `turnwise check`: the contract suite on your own environment
    doctor       `turnwise doctor`: what is installed, and what each preset lacks
    gc           `turnwise gc`: deletes weights that nobody needs
    verify       `turnwise verify`: rows and artifacts that differ from what a finished run left
    describe     `turnwise stages`, from the stages themselves
    data         `turnwise data`: fetches a task's published data, lists what there is
    traces       `turnwise traces`: a sample of episodes for MLflow's page of traces
    bundle       `turnwise import`, `turnwise replay`: imports a bundle; recomputes what a run stored
"""
