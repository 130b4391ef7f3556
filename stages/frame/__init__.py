"""The definition of a stage, and what all packages share: types, the contract, config sections, reading a reply."""
