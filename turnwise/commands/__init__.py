"""The work and the output of each command. `turnwise/arguments` has its arguments."""
