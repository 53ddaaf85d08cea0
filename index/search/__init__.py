"""Answer queries from an index under any filter.

A `filters.Filter` states the conditions of one query. It becomes an `eligible.Eligible`, the bitmap of rows that FAISS
reads.
"""
