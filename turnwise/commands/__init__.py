"""What each command does and shows. `turnwise/arguments` has what each is given.

Modules:

    runs         the commands that run something or list what was run
    study        `turnwise study`: the runs of a comparison, and what they say together
    claims       `turnwise claims`: what the sources claim, and what is seen here
    show         `turnwise show`: a run, or an episode with futures, critiques and refinements beside its turns
    listed       in `turnwise show RUN`: its episodes, by outcome and by what the critic got wrong
    view         `turnwise view`: one or two runs as a page that needs no other file
    due          `turnwise run` with --due: the run that a preset's schedule would have made then
    dry_run      `--dry-run`: what would run, what would be reused
    explain      `turnwise explain`: whether a stage would run again or be reused, and because of what
    lineage      `turnwise lineage`: the stage runs that made a run
    presets      `turnwise presets`: the tasks, methods and models, a line each
    sweep        `turnwise run` with --seeds or lists of values in --set: all combinations, as a study
    compare      `turnwise compare`: runs side by side
    plan         `turnwise plan`: what a run would take, before it runs
    sql          `turnwise sql`: DuckDB's answer about the rows of the runs
    check        `turnwise check`: the contract suite on an environment of one's own
    doctor       `turnwise doctor`: what is installed, what is there, and what each preset lacks
    gc           `turnwise gc`: weights that nobody needs any more
    verify       `turnwise verify`: rows and artifacts that are not what a finished run left
    describe     `turnwise stages`, from the stages themselves
    data         `turnwise data`: fetches a task's published data, lists what there is
    traces       `turnwise traces`: a sample of episodes for MLflow's page of traces
    bundle       `turnwise import`, `turnwise replay`: a bundle taken in, and what a run stored worked out again
"""
