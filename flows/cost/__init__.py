"""What a run would cost: work, memory and hours, counted from its config before it runs."""
