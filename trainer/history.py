"""The history of a run, and the choice of the best point of a curve."""

from dataclasses import dataclass, field

from longtail.bundle import CurvePoint


@dataclass
class TrainingHistory:
    """Hold loss and validation metric of a run by epoch; a bundle keeps the history as `history.json`.

    Attributes:
        losses: mean training loss of every epoch, nats.
        metrics: the validation metric after an epoch, by epoch (from 1).
        best_epoch: epoch of the highest metric, of the epochs that miss the floors least; without validation the last.
        tree_penalties: mean log p_n(y|x) of held-out pairs, nats, by λ_n, if cross-validation chose λ_n of the tree.
        temperatures: the validation metric after a short run, by temperature, if `auto` chose the temperature.
        runs: id of the last run, by tracker, such as `mlflow`.
        missed: the sum by which floors were missed after an epoch, by epoch; 0 if all were reached.
    """

    losses: list[float] = field(default_factory=list)
    metrics: dict[int, float] = field(default_factory=dict)
    best_epoch: int = 0
    tree_penalties: dict[float, float] = field(default_factory=dict)
    temperatures: dict[float, float] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)
    missed: dict[int, float] = field(default_factory=dict)

    def out_of_patience(self, patience: int | None) -> bool:
        """Return whether this many evaluations have passed since the best; never if None."""
        if patience is None or not self.metrics:
            return False
        return sum(epoch > self.best_epoch for epoch in self.metrics) >= patience

    def rank(self, epoch: int) -> tuple[float, float]:
        """Return what orders epochs, larger is better: floors come before the metric."""
        return -self.missed.get(epoch, 0.0), self.metrics[epoch]

    def best_rank(self) -> tuple[float, float]:
        """Return the highest `rank` of the validated epochs."""
        return max(map(self.rank, self.metrics))


def select_best(curve: list[CurvePoint], metric: str) -> CurvePoint:
    """Return the point of the highest metric; the largest λ, then the μ nearest 0, breaks ties."""
    return max(curve, key=lambda point: (point.metrics[metric].value, point.bias_removal, -abs(point.popularity)))
