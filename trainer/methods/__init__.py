"""Optional parts of a loss that need columns of a batch, each an object in a file of its own.

To add one, write a `Method` with its columns and its change of the loss, add its key to `LossConfig`, and list it here.
"""

from __future__ import annotations

from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.losses.method import Method
from longtail.trainer.methods.brought import Impressions, Retrieved
from longtail.trainer.methods.known import KnownPositives, known_among
from longtail.trainer.methods.neighbours import Neighbours
from longtail.trainer.methods.queries import ByObjective, NegativesPerQuery, OwnInAudience, PooledPositives
from longtail.trainer.methods.top_k import HeldToTopK

__all__ = ["KnownPositives", "known_among", "methods_of"]


def methods_of(recipe: Recipe, dataset: Dataset, encoding: Encoding) -> list[Method]:
    """Create the methods of a job, in the order in which they change the loss."""
    loss, train, made = recipe.loss, dataset.train, list[Method]()
    if loss.resolved_hits == "mask_known":
        made.append(KnownPositives.of(train, len(dataset.label_ids)))
    if recipe.objectives:
        made.append(ByObjective(train))
    if loss.pools:
        made.append(PooledPositives(loss.family.name, train, recipe.training.accumulate))
    if loss.negatives_per == "query":
        made.append(NegativesPerQuery(train))
    if loss.top_k is not None:
        made.append(HeldToTopK(recipe, loss.top_k, dataset))
    if encoding.audience is not None:
        made.append(OwnInAudience(encoding.audience))
    if loss.impressions:
        made.append(Impressions(loss.impressions, train, dataset.impressions))
    if loss.retrieved_negatives is not None:
        made.append(Retrieved(recipe, loss.retrieved_negatives, dataset))
    if loss.neighbours is not None:
        made.append(Neighbours(loss.neighbours, dataset, encoding.query.of_queries))
    return made
