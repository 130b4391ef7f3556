"""Recomputes what a run stored from the inputs of its stages, and compares: on any CPU, without engine or environment."""
