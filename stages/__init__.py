"""Every step of turnwise is a stage; see `contract.py` for what a stage is and docs/architecture.md for the picture."""
