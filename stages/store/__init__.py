"""Where runs and rows live, and how a stage is run or found again: MLflow, DuckDB, plain files.

Modules:

    execute    runs one stage, or reuses the finished run with the same fingerprint
    tracking   runs, metrics and artifacts (MLflow)
    replay     rows of all runs (DuckDB)
    search     which runs there are, read from MLflow's tables
    duckdb_file  the replay's file: made once, upgraded once, attached for as long as it is used
    stage_context  what a stage's function may see
    upkeep     repairs: runs that died, and artifacts that changed after they were written
    tables     the columns of every table, and rows as Arrow and Parquet
    columns    what every table and column holds, in words
    artifacts  artifacts as plain files
    runs       one run as the store knows it
    sqlite     the tracking database: created once, errors told in a sentence
    machine    whether a process still lives, whether the disk is full
    contents    the code and files that a config names, as hashes for the fingerprint
    equal_work  equal work at once: one process works, the others wait for it
    notes       descriptions and links of stage runs, for MLflow's page
    models      adapters as versions of registered models: champion, candidates, decisions
    workspace   what a stage run needs, and what it leaves
    mlflow_db   MLflow's database: made whole or not at all, upgraded once
    mlflow_traces  episodes as traces of a run
    mlflow_run  a run as a value that moves from one store to another under its id
"""
