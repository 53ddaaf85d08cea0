"""Answer queries from an index's popularity bands, under any filter. A filter passes through three types:

`filters.Filter` is what one query asks for, in label rows and buckets; it knows no index.
`eligible.EligibleLabels` is that resolved against the bands of one index; those of buckets are kept for later queries.
`eligible.IdSet` is the part of one band, as the bitmap of index ids that FAISS reads while it searches.
"""
