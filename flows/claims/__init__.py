"""`turnwise claims`: what the sources say of the two methods, and what is seen here. No learning.

Modules:

    sources   the sixteen claims: whose they are, their figure there, their control here, and what they rest on
    evidence  what a claim can rest on, and when it holds
    programs  programs of the repository that a claim rests on besides runs: run once, kept, and read
"""
