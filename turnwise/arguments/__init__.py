"""The command line's arguments, command by command. `turnwise/cli.py` builds the parser of them."""
