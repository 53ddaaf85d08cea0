"""Reading of files into integer pairs and encoded features.

`interactions.py` and `tables.py` read files; `pairs.py`, `cut.py` and `dataset.py` build the data set; `columns.py` and
`encode.py` encode features; `batches.py` builds the batches of an epoch; `sources/` has the known data sets.
"""
