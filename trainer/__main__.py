"""`python -m longtail.trainer` is `longtail-train`."""

from longtail.commands import trainer

trainer()
