"""What things cost in time: training steps, engines, rollouts, the stores, a whole run."""
