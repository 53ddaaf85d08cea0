"""Events for training and analysis: what was chosen, which labels changed, and a share of the answers.

    schema.py    the one schema of all events, and events as JSON
    sink.py      what a place for events does
    folder.py    a folder: segments of JSON lines, rotated to Parquet
    kafka.py     a topic of Kafka
    reader.py    events of a folder, as a table of DuckDB

Imports no web framework.
"""
