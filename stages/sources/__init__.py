"""The published data of the tasks: where it lies, under which licence, and how it becomes what the environments read.
Ours.
"""
