"""Engines (who generates) and roles (what they are asked)."""
