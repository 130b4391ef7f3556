"""The published data of the tasks: its source, its licence, and its conversion for the environments. Ours."""
