"""Exact ranking over the whole catalogue (`ranking.py`), its metrics, the report, and the figures of a bundle."""
