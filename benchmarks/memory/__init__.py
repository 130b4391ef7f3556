"""What things cost in memory."""
