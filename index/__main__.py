"""`python -m index` is `longtail-index`."""

from index.cli import main

main()
