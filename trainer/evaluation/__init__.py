"""Exact ranking over the whole catalogue, its metrics, and the report."""
