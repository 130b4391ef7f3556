"""Stored rows become batches, passes and losses; a model is opened for training."""
