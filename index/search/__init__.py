"""Answer queries from an index's popularity bands, under any filter."""
