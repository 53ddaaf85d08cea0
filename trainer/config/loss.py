"""Sampler × weight × family, and mining between them: `[loss]`."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from longtail.trainer.config.base import Section
from longtail.trainer.config.loss_choices import FamilyConfig, SamplerConfig, WeightConfig
from longtail.trainer.config.mining import MiningConfig
from longtail.trainer.config.nearest import NeighboursConfig
from longtail.trainer.config.retrieved import RetrievedConfig
from longtail.trainer.config.top_k import TopKConfig
from longtail.trainer.losses.batch_loss import RetrievedNegatives
from longtail.trainer.losses.families import LOSSES
from longtail.trainer.losses.hits import Hits
from longtail.trainer.losses.objective import Objective
from longtail.trainer.losses.weights import MARGINS


class LossConfig(Section):
    """Independent choices: sampler × weight × family, and mining between them [METHODS §2, §3]."""

    family: FamilyConfig = FamilyConfig()
    weight: WeightConfig = WeightConfig()
    sampler: SamplerConfig = SamplerConfig()
    hits: Hits | None = None
    """Draws that are positives of their row. `mask`: the row's positive is no negative. `keep`: every draw counts.
    `mask_known`: nor are other training positives of the row's query. By default the family's [METHODS §2.1]."""
    negatives_per: Literal["pair", "query"] = "pair"
    """`query`: the negatives of a query count once for all its n training pairs, 1/n with each, of a loss that has
    every logit against 0. With `hits = "mask_known"` that is one target per label: multi-label [METHODS §2.7]."""
    mining: MiningConfig | None = None
    top_k: TopKConfig | None = None
    """Weighs positives by how far they are above the K-th highest score of their query (SL@K) [METHODS §2.5]."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """ε: the target has 1 − ε on the positive and ε spread over all labels alike, of a cross-entropy [METHODS §2.6]."""
    impressions: float = Field(default=0.0, ge=0)
    """Weight of every label of `data.impressions` that was shown with a row and not chosen, a negative beside those
    drawn: as it stands, for no sampler drew it [METHODS §2.3]. The first 32 of a row count. 0 leaves them out."""
    retrieved_negatives: RetrievedConfig | None = None
    """Labels that the model itself ranked high for a row's query at the beginning of the epoch, negatives beside those
    drawn (ANCE) [METHODS §3.1]."""
    neighbours: NeighboursConfig | None = None
    """Holds queries and labels to their nearest neighbours in the training pairs (NESCL) [METHODS §10.3]."""
    regularizer: float = Field(default=0.0, ge=0)
    """Strength of (f + log q)² on positives and negatives [BM20 eq. 6]; with family `nce` of f² before −log L is
    added to f."""
    reweight: float = Field(default=0.0, ge=0)
    """Multiplies the loss of a pair by π_y^−reweight, mean 1 over the training pairs; of counted frequencies."""
    smoothing: float = Field(default=0.5, gt=0)
    """Pseudo-pairs added to every label's frequency, in the weights, in log ν and in log π."""
    frequencies: Literal["counted", "streaming"] = "counted"
    """Where weights take frequencies from: counted before training, or estimated from the gaps between a
    label's occurrences while it runs [Yi19 Algorithm 2], whatever its pairs weigh. log ν and log π of the bundle are
    always counted."""

    @field_validator("neighbours")
    @classmethod
    def _or_none(cls, neighbours: NeighboursConfig | None) -> NeighboursConfig | None:
        return neighbours if neighbours is not None and neighbours.weight else None

    @model_validator(mode="after")
    def _defined(self) -> Self:
        family = LOSSES[self.family.name]
        if family.weights is not None and self.weight.name not in family.weights:
            raise ValueError(
                f"weight: expected {' or '.join(family.weights)} with family {self.family.name!r}, to whose definition "
                f"it belongs, received {self.weight.name!r}"
            )
        if family.shifted and self.sampler.exclude_positive:
            raise ValueError(
                f"sampler: expected no exclude_positive with family {self.family.name!r}, in which the positive is "
                "drawn as often as q says, received exclude_positive = True"
            )
        if family.shifted and self.resolved_hits != "keep":
            raise ValueError(
                f"hits: expected 'keep' with family {self.family.name!r}, which tells data from noise, and noise that "
                f"happens to be a positive is noise, received {self.hits!r}"
            )
        if self.hits == "keep" and self.sampler.never_the_positive:
            which = "exclude_positive" if self.sampler.exclude_positive else f"sampler {self.sampler.name!r}"
            raise ValueError(
                f"hits: expected 'mask' or 'mask_known' with {which}, which draws no positive to keep, received 'keep'"
            )
        if self.negatives_per == "query" and (family.ranks or family.shifted or self.family.pairwise):
            raise ValueError(
                f"negatives_per: expected 'pair' with {self.family}, whose negatives stand against each positive, or "
                "are noise in proportion to them, received 'query'"
            )
        if family.shifted and self.impressions:
            raise ValueError(
                f"impressions: expected 0 with family {self.family.name!r}, which tells data from noise that q draws, "
                f"received {self.impressions}"
            )
        if self.retrieved_negatives is not None:
            if family.shifted:
                raise ValueError(
                    f"retrieved_negatives: expected none with family {self.family.name!r}, which tells data from noise "
                    f"that q draws, received {self.retrieved_negatives}"
                )
            if self.sampler.name == "adversarial" and self.retrieved_negatives.bias_removal:
                raise ValueError(
                    "retrieved_negatives: expected bias_removal = 0 with sampler 'adversarial', whose noise is of the "
                    f"query, received {self.retrieved_negatives.bias_removal:g}"
                )
        if self.top_k is not None and not family.ranks and not self.family.pairwise:
            raise ValueError(
                f"top_k: expected none with family {self.family.name!r}, whose loss has every logit against 0 and does "
                f"not grow with the rank of the positive, received {self.top_k}"
            )
        if self.label_smoothing and not family.cross_entropy:
            raise ValueError(
                f"label_smoothing: expected 0 with family {self.family.name!r}, which is no cross-entropy of a target, "
                f"received {self.label_smoothing}"
            )
        if family.stateful and self.mining is not None:
            raise ValueError(
                f"mining: expected none with family {self.family.name!r}, whose bound needs an unbiased sum over "
                f"negatives, received {self.mining}"
            )
        if self.regularizer and family.cosine:
            raise ValueError(
                f"regularizer: expected 0 with family {self.family.name!r}, whose f is a cosine and no log-odds to add "
                f"log q to, received {self.regularizer}"
            )
        if self.sampler.name == "minimum_variance":
            if self.weight.name not in MARGINS:
                raise ValueError(
                    f"weight: expected {', '.join(MARGINS)} with sampler 'minimum_variance', whose q is of its "
                    f"margin, received {self.weight.name!r}"
                )
            if self.mining is not None or self.regularizer:
                raise ValueError(
                    "sampler 'minimum_variance': expected no mining and no regularizer, which its q does not know of, "
                    f"received mining = {self.mining}, regularizer = {self.regularizer}"
                )
        if self.frequencies == "streaming" and self.sampler.name == "popularity":
            raise ValueError(
                "frequencies: expected 'counted' with sampler 'popularity', which draws by counts, received 'streaming'"
            )
        return self

    @property
    def pools(self) -> bool:
        """Get whether a query's positives in a batch share one term: as the family has it, unless each has a weight."""
        return LOSSES[self.family.name].pooled and self.top_k is None

    @property
    def resolved_hits(self) -> Hits:
        """`hits`, or the family's own: a pairwise form and a sampler that never draws the positive mask it."""
        if self.hits is not None:
            return self.hits
        return "mask" if self.family.pairwise or self.sampler.never_the_positive else LOSSES[self.family.name].hits

    def uncalibrated(self) -> str | None:
        """Why no λ makes this loss's scores log-probabilities but for a constant of the query; None if one does.

        `calibrated_at` is that λ. What is asked is what the optimum is where scores are free [METHODS §2.1, §9].
        """
        family, weight, hits = self.family.name, self.weight.name, self.resolved_hits
        softmax = family == "softmax"
        ones = self.sampler.name == "full" and weight in ("unit", "relative")
        if family not in ("logistic", "nce", "softmax", "augment_and_reduce", "bilateral_softmax"):
            return f"family {family!r} does not converge to log p(y|x)"
        if self.family.power not in (None, 1):
            return f"with power {self.family.power:g}, {family!r} weighs positives and negatives differently"
        if self.mining is not None:
            return "mining weighs a negative by its rank"
        if self.impressions:
            return "impressions are negatives that no q draws"
        if self.retrieved_negatives is not None:
            return "retrieved_negatives follow the model's own scores, and no q draws them"
        if self.neighbours is not None:
            return "neighbours draw embeddings together whatever p(y|x) is"
        if self.label_smoothing:
            return f"with label_smoothing {self.label_smoothing:g} it converges to log[(1 − ε)·p(y|x) + ε/L]"
        if self.top_k is not None:
            return "top_k weighs pairs by their own scores"
        if self.weight.threshold:
            return "labels below the weight's threshold are no negatives"
        masks = family == "bilateral_softmax" or (family == "logistic" and not self.family.pairwise)
        if hits == "mask_known" or (hits == "mask" and masks):
            return f"with hits {hits!r}, {family!r} does not converge to log p(y|x)"
        if hits == "keep" and (softmax or family == "augment_and_reduce"):
            return f"with hits 'keep', {family!r} counts the positive twice"
        if softmax and not ones and weight not in ("importance", "tail", "logit_adjusted"):
            return f"with weight {weight!r}, {family!r} converges to s(1 − s + s/c) ∝ p(y|x)"
        of_q, of_pi = self._powers_in_noise
        if self.sampler.name == "model" and of_q:
            return "what sampler 'model' draws by depends on the query and is not kept"
        if self.sampler.name == "adversarial" and (of_q not in (0, 1) or of_pi):
            return "what training divides p(y|x) by is not the tree alone, so that no λ of the tree removes it"
        return None

    @property
    def calibrated_at(self) -> float:
        """Return the λ of scores that are log-probabilities, of a loss that has one: 0 where there is nothing to
        remove."""
        of_q, of_pi = self._powers_in_noise
        even = self.sampler.name in ("uniform", "full") or self.sampler.alpha == 0
        return 0.0 if of_pi == 0 and (even or of_q == 0) else 1.0

    def could_imply(self, noise: str) -> bool:
        """Return whether ν of this loss may have that name, as `name_of_noise` gives it.

        Where the parts of ν are known without training, they are compared: `reweight` above all.
        """
        of_q, of_pi = self._powers_in_noise
        if self.sampler.name == "adversarial":
            return noise.startswith("p_n(y|x)") and (of_pi != 0) == ("·" in noise)
        even = self.sampler.name in ("uniform", "full") or self.sampler.alpha == 0
        known = not math.isnan(of_pi) and (even or of_q == 0)
        if not known or noise == "uniform":
            return not known or of_pi == 0
        return noise == ("π" if of_pi == 1 else f"π^{of_pi:.4g}")

    @property
    def _powers_in_noise(self) -> tuple[float, float]:
        """Return the powers of q and of π in ν, by names and parameters [METHODS §9]; NaN where ν is no power of π."""
        if LOSSES[self.family.name].shifted:
            return 0.0, self.reweight
        given, pairwise = self.weight.arguments, bool(self.family.pairwise)
        exponent = given.get("exponent", 0.25)
        of_scale = math.nan if exponent and given.get("scale") is not None else exponent
        tau = given.get("tau", 1.0) if self.weight.name == "logit_adjusted" else 1.0
        powers = {
            "unit": (1.0, 0.0),
            "constant": (1.0, 0.0),
            "importance": (0.0, 0.0),
            "relative": (-1.0, 0.0) if pairwise else (0.0, 0.0),
            "tail": (0.0, 2.0 if pairwise else 1.0),
            "logit_adjusted": (0.0, 2 * tau if pairwise else tau),
            "equalised": (0.0, given.get("power", 1.0)),
            "adaptive": (0.0, of_scale if pairwise else 0.0),
        }
        of_q, of_pi = powers.get(self.weight.name, (math.nan, math.nan))
        return of_q, of_pi + self.reweight

    @property
    def comes_with_rows(self) -> bool:
        """Return whether rows of a batch bring negatives of their own: impressions, retrieved ones, or both."""
        return bool(self.impressions) or self.retrieved_negatives is not None

    @property
    def retrieved(self) -> RetrievedNegatives | None:
        """Return number and weight of retrieved negatives; None without."""
        config = self.retrieved_negatives
        return None if config is None else RetrievedNegatives(config.negatives, config.weight)

    @property
    def beside_noise(self) -> str:
        """Return what a manifest adds to the name of ν where rows bring negatives of their own, which are not in it."""
        named = {"impressions": self.impressions, "retrieved negatives": self.retrieved_negatives}
        there = " and ".join(name for name, setting in named.items() if setting)
        return f" of the draws, not of the {there}" if there else ""

    def objective(self) -> Objective:
        """Return the loss function that this section describes."""
        return Objective(
            family=self.family.name,
            weight=self.weight.name,
            family_arguments=self.family.arguments,
            weight_arguments=self.weight.arguments,
            mining=None if self.mining is None else self.mining.mining(),
            regularizer=self.regularizer,
            label_smoothing=self.label_smoothing,
            tau=1.0 if self.top_k is None else self.top_k.temperature,
        )

    def __str__(self) -> str:
        mined = "" if self.mining is None else f" · mined({self.mining})"
        hits = "" if self.hits is None else f" · hits {self.hits}"
        reweighted = f" · reweight {self.reweight}" if self.reweight else ""
        shown = f" · impressions {self.impressions}" if self.impressions else ""
        smoothed = f" · label_smoothing {self.label_smoothing}" if self.label_smoothing else ""
        held = "" if self.top_k is None else f" · {self.top_k}"
        beside = "" if self.retrieved_negatives is None else f" · {self.retrieved_negatives}"
        near = "" if self.neighbours is None else f" · {self.neighbours}"
        per = "" if self.negatives_per == "pair" else f" · negatives per {self.negatives_per}"
        choices = f"{self.family} · {self.sampler} · {self.weight}"
        return f"{choices}{hits}{per}{mined}{smoothed}{held}{reweighted}{shown}{beside}{near}"
