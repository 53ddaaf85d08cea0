"""`python -m serving` is `longtail-serve`."""

from serving.cli import main

main()
