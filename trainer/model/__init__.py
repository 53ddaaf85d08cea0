"""The two towers, their tables and optimisers, and the training step."""
