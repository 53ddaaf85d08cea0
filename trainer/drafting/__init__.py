"""A first recipe from the data themselves: what columns hold (`columns.py`), which are ids and times (`roles.py`), and
a recipe that says why it is as it is (`recipe.py`)."""

from longtail.trainer.drafting.recipe import draft_recipe

__all__ = ["draft_recipe"]
