"""A pipeline run as a folder that needs no store. It can be shown, replayed and imported into another project.

    bundle.json             the schema, the pipeline run and its stage runs, inputs first
    sha256.json             path -> sha256 of every other file
    runs/RUN/run.json       tags, params, metrics with all their steps (`stages/store/mlflow_run.py`)
    runs/RUN/artifacts/     config, inputs, outputs, rows as Parquet, weights as safetensors, as in the store
    files/                  the base model and the data that configs name, if they are small, by their paths
    prompts/                the prompts of the run's roles

Whoever reads a bundle checks everything in it first: it may come from anywhere.
"""
