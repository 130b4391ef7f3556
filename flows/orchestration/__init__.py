"""Prefect: runs as flows, servers, deployments and schedules.

Modules:

    launch       starts a pipeline or a rerun, under Prefect or plainly
    flow         the same pipeline as a Prefect flow with one task a stage
    deployments  every preset as a Prefect deployment, with its schedule
    services     `turnwise ui` and `turnwise serve`: servers that stay up until Ctrl-C
    server       finds a Prefect server, or starts one for the run
    leash        runs a server that must not outlive the command that started it
    alert           tells somebody that a deployment's run failed
    page            what a flow run's page shows of its pipeline
    recurring       what a deployment's next run does: a new seed, more iterations, all again, or on from the champion
    prefect_server  runs Prefect's server on a socket that it was handed
"""
