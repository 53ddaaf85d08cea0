"""The findings of the papers behind Longtail, on data at hand: `python -m benchmarks.seeds`."""
