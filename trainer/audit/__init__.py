"""Audit the lists of any recommender against interactions and a promise: `longtail-audit`."""
