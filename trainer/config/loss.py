"""`[loss]`: the sampler of negatives, their weights, the loss family, and hard negative mining."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from longtail.bundle import BUCKET_NAMES
from longtail.trainer.config.base import RowChoice, Section
from longtail.trainer.losses.families import LOSSES
from longtail.trainer.losses.hits import Hits
from longtail.trainer.losses.mining import Mining
from longtail.trainer.losses.objective import Objective
from longtail.trainer.losses.weights import MARGINS
from longtail.trainer.sampling.model_based import FEATURES_BANDWIDTH

Count = Annotated[int, Field(ge=1)]
Side = Literal["query", "label"]


class FamilyChoice(RowChoice):
    """Choose the loss family: a row of [`LOSSES`](api/losses.md#families) and its parameters [METHODS §2, §4]."""

    registry: ClassVar[str] = "family"
    name: str = "softmax"

    @property
    def pairwise(self) -> bool:
        """Return whether every negative is compared with the positive instead of with 0."""
        return bool(self.argument("pairwise"))


class WeightChoice(RowChoice):
    """Choose the weight of every negative: a row of [`WEIGHTS`](api/losses.md#weights) [METHODS §2.2]."""

    registry: ClassVar[str] = "weight"
    name: str = "unit"


class SamplerChoice(RowChoice):
    """Choose the sampler of negatives: a row of [`SAMPLERS`](api/losses.md#samplers) [METHODS §2.1]."""

    registry: ClassVar[str] = "sampler"
    name: str = "in_batch"

    def _problems(self) -> Iterator[str]:
        if self.argument("exclude_positive") and self.arguments.get("shared"):
            yield f"sampler {self.name!r}: expected shared = False with exclude_positive, which draws for every row"
        if self.name == "model" and self.argument("exact") and self.argument("features") is not None:
            yield f"sampler 'model': expected exact or features, not both, received {self}"

    @property
    def of_the_batch(self) -> bool:
        """Return whether every row uses the batch's labels as negatives."""
        return self.name in ("in_batch", "mixed", "cross_batch")

    def power_of_scores(self, temperature: float) -> float:
        """Return the exponent of e^f in q, 0 without sampler `model`."""
        if self.name != "model":
            return 0.0
        # A kernel draws by e^(bandwidth·cosine), and a score is cosine / temperature.
        bandwidth = self.argument("bandwidth") or (None if self.argument("features") is None else FEATURES_BANDWIDTH)
        return 1.0 if bandwidth is None else bandwidth * temperature

    @property
    def even(self) -> bool:
        """Return whether q is the same for every label."""
        return self.name in ("uniform", "full") or self.argument("alpha") == 0

    @property
    def never_the_positive(self) -> bool:
        """Return whether draws for a row always exclude the row's positive."""
        return bool(self.argument("exclude_positive")) or self.name == "minimum_variance"


class MiningConfig(Section):
    """Mine hard negatives: weigh a row's negatives by the rank of their score [METHODS §3]."""

    keep: int | None = Field(default=None, ge=1)
    """Number of negatives kept: those with the highest scores."""
    power: float = Field(default=0.0, ge=0)
    """Weighs the negative with the j-th highest score by j^−power; 0 weighs all kept negatives equally."""
    theta: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    """ϑ: weights of the negatives with the highest score, the second highest and so on, non-increasing and not
    normalised. It replaces `keep` and `power`, whose weights sum to 1. With weight `importance` and uniform negatives,
    the ϑ of [Re19] is (L − 1)/m times this one."""
    epsilon: float = Field(default=0.0, ge=0)
    """ϑ of all further ranks. With a large enough epsilon the mined loss stays calibrated [Re19 Theorem 4]."""
    draw: int | None = Field(default=None, ge=1)
    """Samples this many ranks with replacement, in proportion to ϑ; the loss uses only these, each with weight Σϑ/draw
    [Re19 §3.1]. By default the loss uses every rank with ϑ > 0."""

    def _problems(self) -> Iterator[str]:
        if self.theta is not None and (self.keep is not None or self.power):
            yield f"mining: expected theta alone or keep and power, received {self}"
        if self.theta is None and self.keep is None and self.power == 0:
            yield "mining: expected keep, power, both or theta, received none"
        if self.epsilon and self.theta is None and self.keep is None:
            yield f"mining: epsilon = {self.epsilon:g} needs keep or theta, as it weighs the ranks beyond them"
        # One rank more than is named: ϑ of the first further rank is epsilon, and must not rise either.
        ranks = self.mining().compute_theta((self.mining().named_count or 0) + 1)
        if ranks[0] == 0 or (np.diff(ranks) > 0).any():
            yield f"mining: expected a non-increasing ϑ that begins above 0, received {ranks.round(6).tolist()}"

    def mining(self) -> Mining:
        """Build the mining rule that this section describes."""
        return Mining(self.keep, self.power, self.theta, self.epsilon, self.draw)

    def __str__(self) -> str:
        keys = self.model_dump(mode="json", exclude_defaults=True)
        return ", ".join(f"{name} = {value}" for name, value in keys.items())


class TopKConfig(Section):
    """Multiply the loss of a pair by σ((f_y − β)/temperature) [METHODS §2.5].

    β is the K-th highest score among all labels for the pair's query.
    """

    k: Count | dict[str, Count]
    """K among all labels. A table such as `{ head = 20, torso = 20, tail = 50 }` ranks each positive among the labels
    of its bucket; positives of buckets that are not in the table keep weight 1."""
    temperature: float = Field(default=1.0, gt=0)
    """τ, in logits. A τ published for cosines is this τ times the model's temperature."""

    def _problems(self) -> Iterator[str]:
        named = list(self.k) if isinstance(self.k, dict) else ["head"]
        if not named or not set(named) <= set(BUCKET_NAMES[:3]):
            yield f"k: expected a number, or one for each of head, torso and tail, received {named}"

    @property
    def by_bucket(self) -> dict[str, int]:
        """Return K by bucket; empty where one K holds for all labels."""
        items = self.k.items() if isinstance(self.k, dict) else ()
        return dict(sorted(items, key=lambda it: BUCKET_NAMES.index(it[0])))

    @property
    def k_overall(self) -> int:
        """Return K among all labels; 0 where each bucket has its own K."""
        return 0 if isinstance(self.k, dict) else self.k

    def __str__(self) -> str:
        named = ", ".join(f"{name} {k}" for name, k in self.by_bucket.items()) or str(self.k)
        return f"top {named} within {self.temperature:g}"


class RetrievedConfig(Section):
    """Add negatives that the model itself ranks high (ANCE) [METHODS §3.1].

    The first epoch trains on the sampler's negatives alone. Before every later epoch, a search finds the `depth`
    highest-scored labels of every training query, without the query's training positives. Each row of a batch draws
    negatives of weight 1 from the list of its query. A search costs as much as an evaluation of all training queries,
    and its lists take depth × 4 bytes per query.
    """

    negatives: Count = 4
    """Labels that a row draws from the list of its query: the list is cut into this many equal parts, and each part
    gives one label at random."""
    depth: Count = 200
    """Length of the lists. True positives that the data lack come first in a list, so long lists are safer."""
    bias_removal: float = Field(default=0.0, ge=-1, le=2)
    """λ of the search. 0 ranks by the score in the loss. To mine the lists that will be served, set the λ to be
    served, usually 1."""

    def _problems(self) -> Iterator[str]:
        if self.depth < self.negatives:
            yield f"depth: expected at least negatives = {self.negatives}, received {self.depth}"

    def __str__(self) -> str:
        return f"{self.negatives} of {self.depth} retrieved"


class NeighboursConfig(Section):
    """Add a contrastive term that pulls nearest neighbours together (NESCL) [METHODS §10.3].

    The term contrasts a row's query, and a row's label, with one nearest neighbour each, against the other rows of the
    batch. It is added to the loss of any family. Neighbours are found once, before training; their lists take k × 4
    bytes per query and per label.
    """

    k: Annotated[int, Field(ge=1)] = 5
    """Largest number of neighbours of a query or label. Nearest are those with the highest cosine of training pairs."""
    temperature: float = Field(default=0.1, gt=0)
    """T of the term. Its scores are always cosines, even with `model.similarity = "dot"`."""
    weight: float = Field(default=0.1, gt=0)
    """Weight of each side's term, relative to weight 1 for the row's loss."""
    sides: Annotated[tuple[Side, ...], Field(min_length=1, max_length=2)] = ("query", "label")
    """Sides with the term: `query`, `label` or both. `query` needs query features that are equal in every row of a
    query."""

    def _problems(self) -> Iterator[str]:
        if len(set(self.sides)) < len(self.sides):
            yield f"sides: expected each once, received {', '.join(self.sides)}"

    def __str__(self) -> str:
        return f"{self.k} neighbours of {' and '.join(self.sides)}, {self.weight:g} within {self.temperature:g}"


class LossConfig(Section):
    """Choose sampler, weight, family and mining independently of each other [METHODS §2, §3]."""

    family: FamilyChoice = FamilyChoice()
    weight: WeightChoice = WeightChoice()
    sampler: SamplerChoice = SamplerChoice()
    hits: Hits | None = None
    """Treatment of accidental hits, sampled negatives that are in fact positives. `mask` removes draws of the row's
    positive. `mask_known` also removes other training positives of the row's query. `keep` counts every draw. The
    default depends on the family [METHODS §2.1]."""
    negatives_per: Literal["pair", "query"] = "pair"
    """`query` counts the negatives of a query once for all its n training pairs, with weight 1/n in each. The loss must
    compare every logit with 0. With `hits = "mask_known"` this is a multi-label loss, one target per label
    [METHODS §2.7]."""
    mining: MiningConfig | None = None
    top_k: TopKConfig | None = None
    """Weighs each positive by its margin over the K-th highest score of its query (SL@K) [METHODS §2.5]."""
    impressions: float = Field(default=0.0, ge=0)
    """Weight of shown negatives: labels of `data.impressions` that were shown with a row and not chosen. No sampling
    correction applies, as no sampler drew them [METHODS §2.3]. The first 32 of a row count; 0 adds none."""
    retrieved_negatives: RetrievedConfig | None = None
    """Adds negatives that the model itself ranks high for a row's query (ANCE) [METHODS §3.1]."""
    neighbours: NeighboursConfig | None = None
    """Pulls queries and labels towards their nearest neighbours in the training pairs (NESCL) [METHODS §10.3]."""
    regularizer: float = Field(default=0.0, ge=0)
    """Strength of the penalty (f + log q)² on positives and negatives [BM20 eq. 6]. With family `nce` the penalty is
    f², with f before −log L is added."""
    reweight: float = Field(default=0.0, ge=0)
    """Multiplies the loss of a pair by π_y^−reweight, scaled to mean 1 over the training pairs. π is always counted."""
    smoothing: ClassVar[float] = 0.5
    """Pseudo-pairs added to every label's count, in the weights, in log ν and in log π."""
    frequencies: Literal["counted", "streaming"] = "counted"
    """Source of the frequencies in weights. `counted`: counts before training. `streaming`: estimates from the gaps
    between a label's occurrences during training [Yi19 Algorithm 2], which ignore the weights of pairs. log ν and log π
    of the bundle always use counts."""

    def _problems(self) -> Iterator[str]:
        family, sampler, weight = LOSSES[self.family.name], self.sampler, self.weight.name
        of_family, retrieved = f"with family {self.family.name!r}", self.retrieved_negatives
        if family.weights is not None and weight not in family.weights:
            yield f"weight: expected {' or '.join(family.weights)} {of_family}, a part of it, received {weight!r}"
        if family.shifted:
            refused = {
                "sampler.exclude_positive": sampler.argument("exclude_positive"),
                f"hits = {self.resolved_hits!r}": self.resolved_hits != "keep",
                "negatives_per = 'query'": self.negatives_per == "query",
                "impressions": self.impressions,
                "retrieved_negatives": retrieved,
            }
            if names := [name for name, value in refused.items() if value]:
                yield f"{', '.join(names)}: not allowed {of_family}, whose noise must be exactly what q draws"
        elif self.negatives_per == "query" and (family.ranks or self.family.pairwise):
            yield f"negatives_per: expected 'pair' with {self.family}, which compares negatives with each positive"
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
        """Return whether a query's positives in a batch share one loss term."""
        return LOSSES[self.family.name].pooled and self.top_k is None

    @property
    def resolved_hits(self) -> Hits:
        """Return `hits`, or the default for this family and sampler."""
        if self.hits is not None:
            return self.hits
        return "mask" if self.family.pairwise or self.sampler.never_the_positive else LOSSES[self.family.name].hits

    def explain_uncalibrated(self) -> str | None:
        """Explain why scores are log-probabilities at no λ; None if they are at `calibrated_at`.

        Scores may differ from log-probabilities by a constant per query. The claim holds at the optimum of the loss
        over free scores [METHODS §2.1, §9].
        """
        family, weight, hits = self.family.name, self.weight.name, self.resolved_hits
        softmax = family == "softmax"
        # Every label is drawn once, so these weights are all 1, and the sum over labels is exact.
        ones = self.sampler.name == "full" and weight in ("unit", "relative")
        if self.pools:
            return f"{family!r} pools a query's positives in a batch, and one well-scored positive satisfies the loss"
        if family not in ("logistic", "nce", "softmax", "augment_and_reduce"):
            return f"family {family!r} does not converge to log p(y|x)"
        for setting, reason in (
            (self.mining, "mining weighs a negative by its rank"),
            (self.impressions, "impressions are negatives that no q draws"),
            (self.retrieved_negatives, "retrieved_negatives follow the model's own scores, and no q draws them"),
            (self.neighbours, "neighbours draw embeddings together for any p(y|x)"),
            (self.top_k, "top_k weighs pairs by their own scores"),
            (self.weight.argument("threshold"), "labels below the weight's threshold are no negatives"),
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
        """Return the exponents of q and π in ν [METHODS §9]; NaN where ν is no power of π."""
        # A shifted family subtracts log q from its scores itself, so only `reweight` is left in ν.
        if LOSSES[self.family.name].shifted:
            return 0.0, self.reweight
        weight, pairwise = self.weight, self.family.pairwise
        sides = 2.0 if pairwise else 1.0
        match weight.name:
            case "unit" | "constant":
                of_q, of_pi = 1.0, 0.0
            case "importance":
                of_q, of_pi = 0.0, 0.0
            case "relative":
                of_q, of_pi = (-1.0 if pairwise else 0.0), 0.0
            case "tail":
                of_q, of_pi = 0.0, sides
            case "logit_adjusted":
                of_q, of_pi = 0.0, sides * weight.argument("tau")
            case "equalised":
                of_q, of_pi = 0.0, weight.argument("power")
            case "adaptive":
                exponent, scale = weight.argument("exponent"), weight.argument("scale")
                of_q, of_pi = 0.0, (math.nan if exponent and scale is not None else exponent) if pairwise else 0.0
            case _:
                of_q = of_pi = math.nan
        return of_q, of_pi + self.reweight

    @property
    def noise_suffix(self) -> str:
        """Return what a manifest appends to the name of ν."""
        named = {"impressions": self.impressions, "retrieved negatives": self.retrieved_negatives}
        sources = " and ".join(name for name, setting in named.items() if setting)
        pooled = ", but for pooled positives" if self.pools else ""
        return (f" of the draws, not of the {sources}" if sources else "") + pooled

    def objective(self) -> Objective:
        """Build the loss function that this section describes."""
        return Objective(
            family=self.family.name,
            weight=self.weight.name,
            family_arguments=self.family.arguments,
            weight_arguments=self.weight.arguments,
            mining=None if self.mining is None else self.mining.mining(),
            regularizer=self.regularizer,
        )

    def __str__(self) -> str:
        mining = "" if self.mining is None else f" · mined({self.mining})"
        hits = "" if self.hits is None else f" · hits {self.hits}"
        reweighted = f" · reweight {self.reweight}" if self.reweight else ""
        impressions = f" · impressions {self.impressions}" if self.impressions else ""
        top_k = "" if self.top_k is None else f" · {self.top_k}"
        retrieved = "" if self.retrieved_negatives is None else f" · {self.retrieved_negatives}"
        neighbours = "" if self.neighbours is None else f" · {self.neighbours}"
        per = "" if self.negatives_per == "pair" else f" · negatives per {self.negatives_per}"
        choices = f"{self.family} · {self.sampler} · {self.weight}"
        return f"{choices}{hits}{per}{mining}{top_k}{reweighted}{impressions}{retrieved}{neighbours}"
