"""Recomputes what a run stored from the inputs of its stages, and compares. It runs on any CPU, without an engine that
generates or an environment.
"""
