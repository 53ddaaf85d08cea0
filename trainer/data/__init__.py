"""Reading of files into integer pairs and encoded features.

`loading.py` reads a data set: `interactions.py` and `tables.py` files, `cut.py` splits, as `pairs.py`; `columns.py` and
`encode.py` encode features; `batches.py` builds the batches of an epoch; `sources/` has the known data sets.
"""
