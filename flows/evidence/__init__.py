"""Evidence from many runs: comparisons, and tests of the sources' claims. No learning.

`study/` compares methods over tasks and seeds (`turnwise study`). The files here belong to `turnwise claims`.

Modules:

    claims   the sixteen claims: source, figure there, control here, and evidence
    kinds    the kinds of evidence, and when a claim holds
    programs programs of the repository that give evidence: run once, stored and read
"""
