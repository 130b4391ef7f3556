"""Evidence: what many runs say together, and what they say of the sources' claims. No learning.

`study/` has the comparison of methods over tasks and seeds, `turnwise study`; the files here are `turnwise claims`.

Modules:

    claims   the sixteen claims: whose they are, their figure there, their control here, and what they rest on
    kinds    what a claim can rest on, and when it holds
    programs programs of the repository that a claim rests on besides runs: run once, kept, and read
"""
