"""Episodes: played, counted, and read back as transitions."""
