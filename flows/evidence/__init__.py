"""Evidence from many runs: comparisons, and tests of the sources' claims. No learning.

`study/` compares methods over tasks and seeds (`turnwise study`). The files here belong to `turnwise claims`.
"""
