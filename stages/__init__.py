"""Every step of turnwise is a stage, defined in frame/contract.py. docs/explanation/architecture.md has the picture."""
