"""Theorems in miniature: NLAC's 5.1 and 5.2 over tables and exact symbols, and the policy gradient of Self-AC by
enumeration.
"""
