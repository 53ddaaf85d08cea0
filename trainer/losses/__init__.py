"""The loss of a batch [METHODS §2, §3].

`hits.py` masks candidates that are no negatives, `weights.py` weighs the others, `mining.py` keeps the hardest, and
`families.py` computes the loss. `objective.py` combines these steps over logits, and `batch_loss.py` computes the
logits from embeddings. `batch.py` holds what they read, and `loss_term.py` defines optional parts of a loss.
"""

from longtail.trainer.losses.batch import BatchCandidates, Embedded, FamilyInputs, SampledLogits, StepInputs
from longtail.trainer.losses.batch_loss import BatchLoss
from longtail.trainer.losses.families import LOSSES, Family
from longtail.trainer.losses.hits import Hits
from longtail.trainer.losses.loss_term import LossTerm
from longtail.trainer.losses.mining import Mining
from longtail.trainer.losses.objective import Objective, balance
from longtail.trainer.losses.weights import MASKED, WEIGHTS, LogProbabilities, LogWeight, pair_weights

__all__ = [
    "LOSSES",
    "MASKED",
    "WEIGHTS",
    "BatchCandidates",
    "BatchLoss",
    "Embedded",
    "Family",
    "FamilyInputs",
    "Hits",
    "LogProbabilities",
    "LogWeight",
    "LossTerm",
    "Mining",
    "Objective",
    "SampledLogits",
    "StepInputs",
    "balance",
    "pair_weights",
]
