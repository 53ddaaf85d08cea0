"""`python -m longtail.serving` is `longtail-serve`."""

from longtail.commands import serving

serving()
