"""Reproduction of findings of the papers behind Longtail, on available data: `python -m benchmarks.seeds`."""
