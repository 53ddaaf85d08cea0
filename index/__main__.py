"""`python -m longtail.index` is `longtail-index`."""

from longtail.index.cli import main

main()
