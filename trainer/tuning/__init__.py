"""Choosing a recipe's values by trials, with Optuna: ranges, one trial, the study on disk, and what it found."""
