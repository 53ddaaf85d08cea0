"""Search of a recipe's values by trials with Optuna: ranges, trials, the study on disk, and its result."""
