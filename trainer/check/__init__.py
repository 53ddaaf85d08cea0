"""What `longtail-train check` says of a recipe and its data before anything is trained; loads no training framework."""

from longtail.trainer.check.figures import Check, check
from longtail.trainer.check.show import show

__all__ = ["Check", "check", "show"]
