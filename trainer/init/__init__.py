"""Drafts of a first recipe from data, with reasons as comments."""
