"""Environments of other libraries as ours, and ours as theirs. None of those libraries is needed until it is used.
Ours.
"""
