"""A first recipe from the data themselves, which says why it is as it is."""

from longtail.trainer.drafting.recipe import draft_recipe

__all__ = ["draft_recipe"]
