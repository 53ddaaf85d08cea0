"""Loss families, weights and mining over a batch's logits [METHODS §2, §3]."""

from longtail.trainer.losses.batch_loss import BatchLoss, Candidates, Embedded
from longtail.trainer.losses.families import LOSSES, Family
from longtail.trainer.losses.mining import Mining
from longtail.trainer.losses.objective import Objective, SampledLogits
from longtail.trainer.losses.weights import MASKED, WEIGHTS, LogProbabilities, LogWeight

__all__ = [
    "LOSSES",
    "MASKED",
    "WEIGHTS",
    "BatchLoss",
    "Candidates",
    "Embedded",
    "Family",
    "LogProbabilities",
    "LogWeight",
    "Mining",
    "Objective",
    "SampledLogits",
]
