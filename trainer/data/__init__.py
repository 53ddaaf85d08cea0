"""Read files into integer pairs and encoded features.

`loading.py` reads a data set: `interactions.py` and `tables.py` read its files, `cut.py` cuts the splits, `pairs.py`
holds their pairs. `columns.py` and `encode.py` encode features; `batches.py` builds the batches of an epoch; `sources/`
has the known data sets.
"""
