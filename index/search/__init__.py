"""Answer queries from an index under any filter.

A `filters.Filter`, what one query asks for, becomes an `eligible.Eligible`, the bitmap of rows that FAISS reads.
"""
