"""Flows chain stages into runs: presets, iterations, reruns, schedules and the command line. No learning, no SQL."""
