"""Comparison of drafted recipes with fast methods of other libraries, on generated shops."""
