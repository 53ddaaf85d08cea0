"""The independent choices of a loss: its family, what its negatives weigh, and who draws them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from longtail.trainer.config.choice import Choice
from longtail.trainer.losses.families import LOSSES, Activation
from longtail.trainer.losses.weights import WEIGHTS
from longtail.trainer.sampling import SAMPLERS

Penalty = Annotated[float, Field(gt=0)]


class FamilyConfig(Choice):
    """The loss family: a row of `LOSSES` and its parameters [METHODS §2, §4]."""

    name: str = "softmax"
    margin: float | None = Field(default=None, ge=-1)
    """Of `contrastive`: the cosine below which a negative costs nothing. Of `ramp`: the width of its slope."""
    power: float | None = Field(default=None, gt=0)
    """Of `bilateral_softmax`: ρ, the weight of the negatives' term; 1 to 1.3."""
    activation: Activation | None = None
    """Of `pairwise_softmax`: what takes the place of the exponential."""
    width: float | None = Field(default=None, gt=0)
    """Of `pairwise_softmax`: gap of logits over which the activation bends; 2/T as published."""
    pairwise: bool | None = None
    """Compares every negative with the positive (POWL) instead of each with 0 (BOWL) [Re19 Definitions 3 and 4]."""

    @model_validator(mode="after")
    def _defined(self) -> Self:
        self._check("family", LOSSES, lambda family: family.loss)
        if self.name == "ramp" and self.margin is not None and self.margin <= 0:
            raise ValueError(f"family 'ramp': expected margin > 0, received {self.margin}")
        return self


class WeightConfig(Choice):
    """The weight of every negative: a row of `WEIGHTS` and its parameters [METHODS §2.2]."""

    name: str = "unit"
    tau: float | None = None
    """Of `logit_adjusted`: exponent of π_y'/π_y; 0 plain softmax, 1 balanced error."""
    power: float | None = None
    """Of `equalised`: exponent of π_y'."""
    threshold: float | None = Field(default=None, ge=0, lt=1)
    """Of `equalised`: labels less frequent than this are no negatives."""
    exponent: float | None = None
    """Of `adaptive`: exponent of 1/π_y."""
    scale: float | None = Field(default=None, gt=0)
    """Of `adaptive`: log ρ = scale·π_y^−exponent, LDAM's own, in place of [R21]'s ρ = π_y^−exponent."""

    @model_validator(mode="after")
    def _defined(self) -> Self:
        self._check("weight", WEIGHTS, lambda weight: weight)
        return self


class SamplerConfig(Choice):
    """The sampler of negatives: a row of `SAMPLERS` and its parameters [METHODS §2.1]."""

    name: str = "in_batch"
    negatives: int | None = Field(default=None, ge=1)
    """Labels drawn per step (per row if not shared)."""
    alpha: float | None = Field(default=None, ge=0)
    """Exponent of `popularity`."""
    shared: bool | None = None
    """One set of draws for the whole batch (the default), or one per row."""
    exclude_positive: bool | None = None
    """Draws per row and leaves out the row's positive (`popularity` draws again up to four times); without, `hits`
    says what becomes of a draw that is it."""
    replace: bool | None = None
    """Of `uniform`: draws with replacement (the default); false draws that many different labels [Re19 Algorithm 1]."""
    dims: int | None = Field(default=None, ge=1)
    """Of `adversarial`: principal components of the query's features that the tree sees."""
    penalty: Penalty | Annotated[tuple[Penalty, ...], Field(min_length=1)] | Literal["cv"] | None = None
    """Of `adversarial`: λ_n of the tree's fit; of several values, or of 0.01 to 10 with "cv", the one under which
    held-out training pairs are likeliest."""
    exact: bool | None = None
    """Of `model`: draws by the model's own probabilities of the whole catalogue, which costs O(B·L·D) a step."""
    features: int | None = Field(default=None, ge=2, multiple_of=2)
    """Of `model`: random Fourier features in place of means of subtrees; half are cosines and half sines."""
    bandwidth: float | None = Field(default=None, gt=0)
    """Of `model`: q ∝ exp(bandwidth · u·v) in place of exp(f), which is as hard as the model finds them; lower is
    nearer uniform. With features 2 if not given."""
    uniform_share: float | None = Field(default=None, ge=0, le=1)
    """Of `minimum_variance`: share of uniform draws."""
    gradients: bool | None = None
    """Of `cross_batch`: embeds remembered labels anew in every step, so that they learn as negatives too."""

    @model_validator(mode="after")
    def _defined(self) -> Self:
        self._check("sampler", SAMPLERS, lambda sampler: sampler)
        if self.exclude_positive and self.shared:
            raise ValueError(
                f"sampler {self.name!r}: expected shared = False with exclude_positive, which draws for every row, "
                "received shared = True"
            )
        if self.exact and self.features is not None:
            raise ValueError(
                f"sampler 'model': expected exact or features, which approximate, received exact = True and "
                f"features = {self.features}"
            )
        return self

    @property
    def of_the_batch(self) -> bool:
        """Return whether the batch's labels are negatives of every row."""
        return self.name in ("in_batch", "mixed", "cross_batch")

    @property
    def never_the_positive(self) -> bool:
        """Return whether no draw is ever the positive of its row, so that there is none to keep."""
        return bool(self.exclude_positive) or self.name == "minimum_variance"
