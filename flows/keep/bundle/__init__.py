"""A pipeline run as a folder that needs no store, to be looked at, replayed and taken into another project.

    bundle.json             whose it is: the schema, the pipeline run, its stage runs, inputs first
    sha256.json             path -> sha256 of every other file
    runs/RUN/run.json       tags, params, metrics with all their steps (`stages/store/mlflow_run.py`)
    runs/RUN/artifacts/     config, inputs, outputs, rows as Parquet, weights as safetensors, as in the store
    files/                  the base model and the data that configs name, where they are small, by their paths
    prompts/                the prompts of the run's roles

Modules:

    layout    the manifest, and what may lie in a bundle
    write     a run becomes a bundle
    check     a bundle is read back: every file by its hash, every value by its type
    take_in   its runs enter the stores of this project
"""
