"""Pure functions over tensors and numbers, and `fit`, the one training loop."""
