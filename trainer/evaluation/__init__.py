"""Rank the whole catalogue exactly (`ranking.py`); compute metrics, baselines, reports and a bundle's figures."""
