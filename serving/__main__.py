"""`python -m longtail.serving` is `longtail-serve`."""

from longtail.serving.cli import main

main()
