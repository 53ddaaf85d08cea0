"""Sampler × weight × family, and mining between them: `[loss]`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from longtail.bundle import BUCKET_NAMES
from longtail.trainer.config.base import Choice, Section
from longtail.trainer.losses.families import LOSSES, Activation
from longtail.trainer.losses.hits import Hits
from longtail.trainer.losses.mining import Mining
from longtail.trainer.losses.objective import Objective
from longtail.trainer.losses.weights import MARGINS

Penalty = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Side = Literal["query", "label"]


class FamilyConfig(Choice):
    """The loss family: a row of `LOSSES` and its parameters [METHODS §2, §4]."""

    registry: ClassVar[str] = "family"
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

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.name == "ramp" and self.margin is not None and self.margin <= 0:
            yield f"family 'ramp': expected margin > 0, received {self.margin}"


class WeightConfig(Choice):
    """The weight of every negative: a row of `WEIGHTS` and its parameters [METHODS §2.2]."""

    registry: ClassVar[str] = "weight"
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


class SamplerConfig(Choice):
    """The sampler of negatives: a row of `SAMPLERS` and its parameters [METHODS §2.1]."""

    registry: ClassVar[str] = "sampler"
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

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.exclude_positive and self.shared:
            yield f"sampler {self.name!r}: expected shared = False with exclude_positive, which draws for every row"
        if self.exact and self.features is not None:
            yield f"sampler 'model': expected exact or features, not both, received features = {self.features}"

    @property
    def of_the_batch(self) -> bool:
        """Return whether the batch's labels are negatives of every row."""
        return self.name in ("in_batch", "mixed", "cross_batch")

    def power_of_scores(self, temperature: float) -> float:
        """Return the power of e^f in q: that of sampler `model`, else 0."""
        if self.name != "model":
            return 0.0
        bandwidth = self.bandwidth or (None if self.features is None else 2.0)
        return 1.0 if bandwidth is None else bandwidth * temperature

    @property
    def even(self) -> bool:
        """Return whether q is the same for every label."""
        return self.name in ("uniform", "full") or self.alpha == 0

    @property
    def never_the_positive(self) -> bool:
        """Return whether no draw is ever the positive of its row, so that there is none to keep."""
        return bool(self.exclude_positive) or self.name == "minimum_variance"


class MiningConfig(Section):
    """Hard negative mining: of a row's negatives, the highest-scored count [METHODS §3]."""

    keep: int | None = Field(default=None, ge=1)
    """Negatives kept, the highest-scored."""
    power: float = Field(default=0.0, ge=0)
    """Weighs the j-th highest-scored by j^−power; 0 weighs what is kept equally."""
    theta: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    """ϑ of the highest-scored, the second and so on, non-increasing, as it stands; in place of keep and power, which
    sum to 1. With weight importance and uniform negatives, [Re19]'s ϑ is (L − 1)/m times this."""
    epsilon: float = Field(default=0.0, ge=0)
    """ϑ of every rank beyond those; the mined loss stays calibrated where it is large enough [Re19 Theorem 4]."""
    draw: int | None = Field(default=None, ge=1)
    """Samples ϑ: as many ranks, drawn in proportion to it with replacement, each weighing its sum by their number; the
    loss is computed of these alone. All that ϑ weighs if not given [Re19 §3.1]."""

    def _problems(self) -> Iterator[str]:
        if self.theta is not None and (self.keep is not None or self.power):
            yield f"mining: expected theta alone or keep and power, received {self}"
        if self.theta is None and self.keep is None and self.power == 0:
            yield "mining: expected keep, power, both or theta, received none"
        if self.epsilon and self.theta is None and self.keep is None:
            yield f"mining: expected keep or theta, beyond which epsilon is, received {self}"
        ranks = self.mining().theta_of((self.mining().named or 0) + 1)
        if ranks[0] == 0 or (np.diff(ranks) > 0).any():
            yield f"mining: expected a non-increasing ϑ that begins above 0, received {ranks.round(6).tolist()}"

    def mining(self) -> Mining:
        """Return what this section describes."""
        return Mining(self.keep, self.power, self.theta, self.epsilon, self.draw)

    def __str__(self) -> str:
        given = self.model_dump(mode="json", exclude_defaults=True)
        return ", ".join(f"{name} = {value}" for name, value in given.items())


class TopKConfig(Section):
    """The loss of a pair is multiplied by σ((f_y − β)/temperature), β the K-th highest score of its query
    [METHODS §2.5]."""

    k: Count | dict[str, Count]
    """K among all labels, or among those of the positive's bucket, such as `{ head = 20, torso = 20, tail = 50 }`; a
    positive of a bucket that is not named counts in full."""
    temperature: float = Field(default=1.0, gt=0)
    """τ, in logits: a published τ of cosines is this one times the model's temperature."""
    published_gradient: bool = False
    """Lets the gradient pass through the weight too, as the authors' code does. It lowers a positive whose loss is
    above temperature/(1 − σ), so that it needs temperature > ½·log L, or rankings turn round [METHODS §2.5]."""
    memory: Count = 100
    """Visits of a query that its β is an average over: more are less noisy, fewer follow the model faster."""

    def _problems(self) -> Iterator[str]:
        named = list(self.k) if isinstance(self.k, dict) else ["head"]
        if not named or not set(named) <= set(BUCKET_NAMES[:3]):
            yield f"k: expected a number, or one for each of head, torso and tail, received {named}"

    @property
    def by_bucket(self) -> dict[str, int]:
        """K by bucket; empty where one K is among all labels."""
        given = self.k.items() if isinstance(self.k, dict) else ()
        return dict(sorted(given, key=lambda it: BUCKET_NAMES.index(it[0])))

    @property
    def whole(self) -> int:
        """K among all labels; 0 where each bucket has its own."""
        return 0 if isinstance(self.k, dict) else self.k

    def __str__(self) -> str:
        named = ", ".join(f"{name} {k}" for name, k in self.by_bucket.items()) or str(self.k)
        published = ", published gradient" if self.published_gradient else ""
        return f"top {named} within {self.temperature:g}{published}"


class RetrievedConfig(Section):
    """Before an epoch the labels that the model ranks first are looked up for every training query, its training
    positives left out, and each row of a batch takes some of its query's as negatives (ANCE) [METHODS §3.1].

    A search costs what an evaluation of all training queries does, and holds depth × 4 bytes for each of them.
    """

    negatives: Count = 4
    """Labels that a row takes of its query's list: one at random of each of as many equal parts of it."""
    depth: Count = 200
    """Length of the lists. Long lists are safer where positives are missing in the data, which come first in them."""
    weight: float = Field(default=1.0, gt=0)
    """What each of them weighs as a negative, as it stands: no sampler drew it."""
    warm_up: int = Field(default=1, ge=0)
    """Epochs before the first search, which have the sampler's negatives alone."""
    every: Count = 1
    """Epochs between searches."""
    bias_removal: float = Field(default=0.0, ge=-1, le=2)
    """λ of the score that is searched by. 0 is the score that the loss is of; a list of what is served, bias removed,
    has its λ, mostly 1."""

    def _problems(self) -> Iterator[str]:
        if self.depth < self.negatives:
            yield f"depth: expected at least negatives = {self.negatives}, received {self.depth}"

    def searched_before(self, epoch: int) -> int | None:
        """Return the epoch before which the lists of an epoch were searched, both from 0; None while it warms up.

        Example:
            >>> [RetrievedConfig(warm_up=1, every=2).searched_before(epoch) for epoch in range(5)]
            [None, 1, 1, 3, 3]
        """
        return None if epoch < self.warm_up else epoch - (epoch - self.warm_up) % self.every

    def __str__(self) -> str:
        return f"{self.negatives} of {self.depth} retrieved, each {self.weight:g}"


class NeighboursConfig(Section):
    """A row's query and its label are each contrasted with one of their nearest neighbours in the training pairs,
    against those of the batch, a term added to any family's loss (NESCL) [METHODS §10.3].

    Neighbours are found once, before training; their lists hold k × 4 bytes for every query and every label.
    """

    k: Annotated[int, Field(ge=1)] = 5
    """Neighbours of a query or label, at most: those whose training pairs have the highest cosine with its own."""
    temperature: float = Field(default=0.1, gt=0)
    """T of the term, whose scores are cosines whatever `model.similarity` is."""
    weight: float = Field(default=0.1, gt=0)
    """Weight of a side's term, with 1 for the row's loss."""
    sides: Annotated[tuple[Side, ...], Field(min_length=1, max_length=2)] = ("query", "label")
    """Whose neighbours: `query`, `label` or both. `query` needs features that are the query's whatever the row."""

    def _problems(self) -> Iterator[str]:
        if len(set(self.sides)) < len(self.sides):
            yield f"sides: expected each once, received {', '.join(self.sides)}"

    def __str__(self) -> str:
        return f"{self.k} neighbours of {' and '.join(self.sides)}, {self.weight:g} within {self.temperature:g}"


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

    def _problems(self) -> Iterator[str]:
        family, sampler, weight = LOSSES[self.family.name], self.sampler, self.weight.name
        of_family, retrieved = f"with family {self.family.name!r}", self.retrieved_negatives
        if family.weights is not None and weight not in family.weights:
            yield f"weight: expected {' or '.join(family.weights)} {of_family}, a part of it, received {weight!r}"
        if family.shifted:
            refused = {
                "sampler.exclude_positive": sampler.exclude_positive,
                f"hits = {self.resolved_hits!r}": self.resolved_hits != "keep",
                "negatives_per = 'query'": self.negatives_per == "query",
                "impressions": self.impressions,
                "retrieved_negatives": retrieved,
            }
            if given := [name for name, value in refused.items() if value]:
                yield f"{', '.join(given)}: not allowed {of_family}, which tells data from noise as q draws it"
        elif self.negatives_per == "query" and (family.ranks or self.family.pairwise):
            yield f"negatives_per: expected 'pair' with {self.family}, whose negatives stand against each positive"
        if self.hits == "keep" and sampler.never_the_positive:
            yield f"hits: expected 'mask' or 'mask_known' with {sampler}, which draws no positive to keep"
        if retrieved is not None and retrieved.bias_removal and sampler.name == "adversarial":
            yield "retrieved_negatives: expected bias_removal = 0 with sampler 'adversarial', whose noise is a query's"
        if self.top_k is not None and not family.ranks and not self.family.pairwise:
            yield f"top_k: not allowed {of_family}, whose loss does not grow with the positive's rank"
        if family.stateful and self.mining is not None:
            yield f"mining: not allowed {of_family}, whose bound needs an unbiased sum over negatives"
        if self.regularizer and family.cosine:
            yield f"regularizer: not allowed {of_family}, whose f is a cosine and no log-odds to add log q to"
        if sampler.name == "minimum_variance" and weight not in MARGINS:
            yield f"weight: expected {', '.join(MARGINS)} with sampler 'minimum_variance', received {weight!r}"
        if sampler.name == "minimum_variance" and (self.mining is not None or self.regularizer):
            yield "sampler 'minimum_variance': expected no mining and no regularizer, for which its q is not the best"
        if sampler.name == "popularity" and self.frequencies == "streaming":
            yield "frequencies: expected 'counted' with sampler 'popularity', which draws by counts"

    @property
    def pools(self) -> bool:
        """Get whether a query's positives in a batch share one term: as the family has it, unless each has a weight."""
        return LOSSES[self.family.name].pooled and self.top_k is None

    @property
    def resolved_hits(self) -> Hits:
        """Return `hits`, by default the family's, but masked of a pairwise form or without draws of the positive."""
        if self.hits is not None:
            return self.hits
        return "mask" if self.family.pairwise or self.sampler.never_the_positive else LOSSES[self.family.name].hits

    def uncalibrated(self) -> str | None:
        """Return why scores are log-probabilities at no λ, but for a constant of the query; None if at `calibrated_at`.

        It is about the loss's optimum where scores are free [METHODS §2.1, §9].
        """
        family, weight, hits = self.family.name, self.weight.name, self.resolved_hits
        softmax = family == "softmax"
        ones = self.sampler.name == "full" and weight in ("unit", "relative")
        if self.pools:
            return f"{family!r} pools a query's positives in a batch, and one label that fits is enough of them"
        if family not in ("logistic", "nce", "softmax", "augment_and_reduce"):
            return f"family {family!r} does not converge to log p(y|x)"
        for setting, reason in (
            (self.mining, "mining weighs a negative by its rank"),
            (self.impressions, "impressions are negatives that no q draws"),
            (self.retrieved_negatives, "retrieved_negatives follow the model's own scores, and no q draws them"),
            (self.neighbours, "neighbours draw embeddings together for any p(y|x)"),
            (self.top_k, "top_k weighs pairs by their own scores"),
            (self.weight.threshold, "labels below the weight's threshold are no negatives"),
        ):
            if setting:
                return reason
        if hits == "mask_known" or (hits == "mask" and family == "logistic" and not self.family.pairwise):
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
        """Return the λ of scores that are log-probabilities; 0 where there is nothing to remove."""
        of_q, of_pi = self._powers_in_noise
        return 0.0 if of_pi == 0 and (self.sampler.even or of_q == 0) else 1.0

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
    def noise_suffix(self) -> str:
        """Return what a manifest adds to the name of ν where positives are pooled, or rows bring negatives."""
        named = {"impressions": self.impressions, "retrieved negatives": self.retrieved_negatives}
        there = " and ".join(name for name, setting in named.items() if setting)
        pooled = ", but for pooled positives" if self.pools else ""
        return (f" of the draws, not of the {there}" if there else "") + pooled

    def objective(self) -> Objective:
        """Return the loss function that this section describes."""
        return Objective(
            family=self.family.name,
            weight=self.weight.name,
            family_arguments=self.family.arguments,
            weight_arguments=self.weight.arguments,
            mining=None if self.mining is None else self.mining.mining(),
            regularizer=self.regularizer,
        )

    def __str__(self) -> str:
        mined = "" if self.mining is None else f" · mined({self.mining})"
        hits = "" if self.hits is None else f" · hits {self.hits}"
        reweighted = f" · reweight {self.reweight}" if self.reweight else ""
        shown = f" · impressions {self.impressions}" if self.impressions else ""
        held = "" if self.top_k is None else f" · {self.top_k}"
        beside = "" if self.retrieved_negatives is None else f" · {self.retrieved_negatives}"
        near = "" if self.neighbours is None else f" · {self.neighbours}"
        per = "" if self.negatives_per == "pair" else f" · negatives per {self.negatives_per}"
        choices = f"{self.family} · {self.sampler} · {self.weight}"
        return f"{choices}{hits}{per}{mined}{held}{reweighted}{shown}{beside}{near}"
