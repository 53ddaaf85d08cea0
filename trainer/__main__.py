"""`python -m longtail.trainer`."""

from longtail.trainer.cli import main

main()
