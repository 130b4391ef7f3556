"""Theorems 5.1 and 5.2 of NLAC in miniature: a text is an exact symbol, a critic is a table, everything can be computed."""
