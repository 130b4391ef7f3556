"""A page of runs and their episodes in one file: `turnwise view`, and an artifact of each pipeline run."""
