"""Where runs and rows live, and how a stage is run or found again: MLflow, DuckDB, plain files."""
