"""Exact ranking over the whole catalogue (`ranking.py`), its metrics, baselines, the report, figures of a bundle."""
