"""Optional parts of a loss that need columns of a batch.

To add one, write a `LossTerm`, add its key to `LossConfig`, and list it here.
"""

from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.loss_terms.extra_negatives import Impressions, Retrieved
from longtail.trainer.loss_terms.known_positives import KnownPositives, mask_known_positives
from longtail.trainer.loss_terms.neighbours import Neighbours
from longtail.trainer.loss_terms.queries import ByObjective, NegativesPerQuery, OwnInAudience, PooledPositives
from longtail.trainer.loss_terms.top_k import WeighByTopK
from longtail.trainer.losses import LossTerm

__all__ = ["KnownPositives", "build_loss_terms", "mask_known_positives"]


def build_loss_terms(recipe: Recipe, dataset: Dataset, encoding: Encoding) -> list[LossTerm]:
    """Create the terms of a job, in the order of their changes."""
    loss, train, terms = recipe.loss, dataset.train, list[LossTerm]()
    if loss.resolved_hits == "mask_known":
        terms.append(KnownPositives.collect(train, len(dataset.label_ids)))
    if recipe.objectives:
        terms.append(ByObjective(train))
    if loss.pools:
        terms.append(PooledPositives(train, recipe.training.accumulate))
    if loss.negatives_per == "query":
        terms.append(NegativesPerQuery(train))
    if loss.top_k is not None:
        terms.append(WeighByTopK(recipe, loss.top_k, dataset))
    if encoding.audience is not None:
        terms.append(OwnInAudience(encoding.audience))
    if loss.impressions:
        terms.append(Impressions(loss.impressions, train, dataset.impressions))
    if loss.retrieved_negatives is not None:
        terms.append(Retrieved(recipe, loss.retrieved_negatives, dataset))
    if loss.neighbours is not None:
        terms.append(Neighbours(loss.neighbours, dataset, encoding.query.query_inputs))
    return terms
