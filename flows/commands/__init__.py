"""What each command does and shows. `flows/cli.py` reads the command line."""
