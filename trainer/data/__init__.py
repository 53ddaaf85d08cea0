"""From files to integer pairs and encoded features.

`tables.py` reads files; `pairs.py`, `cut.py` and `dataset.py` make the data set; `columns.py`
and `encode.py` encode its features; `batches.py` makes the batches of an epoch; `sources/` has the
known data sets.
"""
