"""`python -m longtail.index` is `longtail-index`."""

from longtail.commands import index

index()
