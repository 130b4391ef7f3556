"""What a stage is, and the words that every room shares: types, the contract, sections of config, how a reply is read."""
