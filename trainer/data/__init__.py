"""From files to integer pairs and encoded features.

`tables.py` and `xmc.py` read files; `pairs.py`, `split.py` and `dataset.py` make the data set; `columns.py`,
`vocabularies.py` and `encode.py` encode its features; `batches.py` makes the batches of an epoch; `sources/` has the
known data sets.
"""
