"""The tables of a recipe but for its towers and its loss: `[data]`, `[optimizer]`, `[training]`, `[evaluation]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ByteSize, Field

from longtail.bundle import BUCKET_NAMES
from longtail.trainer.config.base import Choice, Section
from longtail.trainer.config.rows import EventsConfig, Places, Since, Span
from longtail.trainer.metric_registry import k_of
from longtail.trainer.optimizers import ROW_OPTIMIZERS

PLACES = ("train", "valid", "test", "queries", "labels", "prepared")
"""Keys of `data` that name files or folders."""
_RATIOS = ("recall", "ndcg", "precision", "hit_rate", "mrr", "psp", "psndcg")
_FLOORS = ("recall", "coverage", "exposure")
"""Metrics of a bucket that are better higher."""


class SplitConfig(Section):
    """How to cut interactions when `valid` or `test` files are not given."""

    strategy: Literal["random", "random_per_query", "temporal", "temporal_per_query", "leave_last_out"]
    """`random`: pairs by seed. `random_per_query`: so many of every query's pairs, by seed. `temporal`: the latest
    pairs of all. `temporal_per_query`: the latest of every query's pairs. `leave_last_out`: per query, its last pair is
    test and the one before is valid. In the last two file order stands in for time where there is no timestamp."""
    valid: float = Field(default=0.1, ge=0, lt=1)
    """Share of all pairs, or of each query's, rounded; not used by `leave_last_out`."""
    test: float = Field(default=0.1, ge=0, lt=1)
    """Share of all pairs; not used when there is a test file (nor `valid`, when there is a valid file)."""

    def _problems(self) -> Iterator[str]:
        if self.valid + self.test >= 1:
            yield f"split: expected valid + test < 1, received {self.valid} + {self.test}"


class DataConfig(Section):
    """Where interactions and feature tables are, and which of their rows count.

    A place is a file, a directory (every file below it), a glob such as `logs/2026-*/*.parquet`, a URL such as
    `s3://bucket/logs/` (the extra `remote`), or a list of these, relative to the recipe. Files are read in the order of
    the list, then by name. Folders named `key=value` give every file below them a column `key`.
    """

    train: Places
    valid: Places | None = None
    test: Places | None = None
    query_id: str = "query_id"
    label_id: str = "label_id"
    timestamp: str | None = None
    """Number or timestamp column that orders a query's interactions."""
    weight: str | None = None
    """Column of finite weights ≥ 0 that scale each pair's loss. π counts weighted pairs; buckets, and the `count` of a
    label, count pairs; metrics weigh every pair alike. Rows of files that lack `debiased_weight`, the column of exports
    of feedback, weigh 1."""
    impressions: str | None = None
    """Column of lists of label ids, strings or integers: what was shown with the row, chosen or not. `loss.impressions`
    weighs those that were not as negatives. Ids that are not in the catalogue are left out. Files may lack
    `impressions`, the column of exports of feedback."""
    events: EventsConfig | None = None
    """Weights by event type, times `weight` if there is one."""
    since: Since | None = None
    """Only interactions from a time on, such as `2026-01-31`, or from a span before the newest one, such as `30d`."""
    on_bad_row: Literal["error", "drop"] = "error"
    """Rows with a null or empty id, a time or a weight that is no finite number, a weight < 0, an event type without
    a weight, a placeholder, or, of a feature table, an id a second time. `error`: refused, all of them in one report.
    `drop`: left out, counted and listed, and so are rows of implausible times, which `error` only reports: before
    1990, in the future, or in another unit than most."""
    max_bad_rows: int | float = Field(default=0.05, ge=0)
    """Most rows that `drop` leaves out: an integer is a count, any other number a share of the rows read."""
    placeholders: list[str] = Field(default_factory=list)
    """Ids that name nobody, such as `undefined`: rows with one are bad. Unlisted ones that look it are reported."""
    repeats: Literal["keep", "drop"] = "keep"
    """What becomes of pairs that occur again. `drop`: within each split, the latest stays, with the largest weight."""
    queries: Places | None = None
    """Feature table of queries, keyed by `query_id`."""
    valid_from: str | None = None
    """Column of the query table: since when a row's attributes hold, number or timestamp as `timestamp` is. A query
    then has a row for every change, and an interaction those of the last row that is not later than itself; earlier
    than the first, all are missing."""
    labels: Places | None = None
    """Feature table of labels, keyed by `label_id`; its labels are in the catalogue even if never seen."""
    display: list[str] = Field(default_factory=list)
    """Columns of the label table that answers carry along, such as a title."""
    reduction: Literal["expand", "sample", "smallest"] = "expand"
    """Training pairs of a query with several labels. `expand`: one for every label [R21 §5.2]. `sample`: an epoch
    visits every training query once, with one of its labels drawn uniformly [Re19 §5]; held-out queries keep all, and
    frequencies are those of the visits. `smallest`: every query keeps its smallest label id, in every file, before a
    split is cut; other labels leave the catalogue unless `labels` lists them [BM20 A.2]."""
    split: SplitConfig | None = None
    prepared: Path | None = None
    """Folder of the data set as it was read: `longtail-train prepare`, or the first job, writes it, and later jobs map
    it until a file or a setting of reading changes. May be removed at any time."""
    memory: ByteSize = Field(default=ByteSize(4_000_000_000), ge=64_000_000)
    """Limit of reading where `prepared` names a folder, such as `4G`: DuckDB puts there what does not fit."""

    @property
    def ordered(self) -> bool:
        """Return whether a query's pairs are in time order, so that a history is what came before."""
        by_file = ("temporal_per_query", "leave_last_out")
        return self.timestamp is not None or (self.split is not None and self.split.strategy in by_file)

    def _problems(self) -> Iterator[str]:
        if self.timestamp is None and self.since is not None:
            yield "since: expected data.timestamp with it, received none"


class PriorConfig(Section):
    """The prior π* that μ, a request's `popularity`, multiplies [METHODS §6]."""

    kind: Literal["count", "decayed", "forecast"] = "count"
    """`count`: π, the labels' shares of the training pairs. `decayed`: of pairs that weigh less with age, by the
    half-life of the best likelihood. `forecast`: what a regression on the log's past says of the next horizon."""
    horizon: Span | None = None
    """Time until the next model or refreshed prior, such as `7d`; by default the length of what is held out."""
    origins: int = Field(default=12, ge=6)
    """Times within the log that the regression learns from."""
    features: list[str] = Field(default_factory=list)
    """Label features that the regression reads: ids of one value, such as a category, and numbers."""
    since: str | None = None
    """Column of the label table: the date from which on a label is there. Before it, π* gives it nothing."""

    def _problems(self) -> Iterator[str]:
        if self.kind != "forecast" and self.features:
            yield f"features: expected none with kind = {self.kind!r}, received {self.features}"
        if self.kind == "count" and (self.horizon or self.since):
            yield "horizon and since: expected none with kind = 'count'"


class OptimizerConfig(Section):
    """How parameters follow their gradients: sparse for embedding tables, Keras' own for everything dense."""

    embeddings: str = "adam"
    """`adam`: lazy Adam, moments of touched rows only. `adagrad`: one accumulator per row. `adagrad_elementwise`: one
    per number, as [BM20]. `sgd`: gradient descent, as [R21] and [Re19]; the velocity of an untouched row waits."""
    dense: Literal["adam", "adagrad", "sgd"] = "adam"
    """For the MLPs and a learned temperature; `adagrad` has an accumulator per number."""
    embedding_learning_rate: float = Field(default=0.01, gt=0)
    dense_learning_rate: float = Field(default=0.001, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Of `sgd`, for embeddings and dense; [R21] has 0.9."""
    embedding_momentum: float | None = Field(default=None, ge=0, lt=1)
    """Of `embeddings = "sgd"` if it is another; [Re19] has 0 here and momentum in the dense layer."""
    l2: float = Field(default=0.0, ge=0)
    """Minimises the loss + l2·‖θ‖², θ all rows of all tables and all dense parameters but a learned temperature. A
    step adds 2·l2·θ to the gradient of dense parameters, and to a touched row's that for every step since it was last
    touched; rows no step touches keep their values. The printed loss leaves it out. A weight decay of w, as in [R21],
    is l2 = w / 2. `loss.regularizer` is one of scores."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Both rates over training: `linear` and `cosine` fall to 0 at the last of `epochs`."""
    average: float | None = Field(default=None, gt=0, lt=1)
    """Validates and serves the weights' exponential moving average over the steps: one step's weigh `average` times the
    next one's; .999 looks back a thousand."""

    def _problems(self) -> Iterator[str]:
        if self.embeddings not in ROW_OPTIMIZERS:
            yield f"embeddings: expected one of {', '.join(ROW_OPTIMIZERS)}, received {self.embeddings!r}"
        if self.momentum and "sgd" not in (self.embeddings, self.dense):
            yield f"momentum: expected 0 where neither embeddings nor dense is sgd, received {self.momentum}"
        if self.embedding_momentum is not None and self.embeddings != "sgd":
            yield f"embedding_momentum: expected none with embeddings {self.embeddings!r}"

    @property
    def row_arguments(self) -> dict[str, float]:
        """Return arguments of the embeddings' optimiser."""
        if self.embeddings != "sgd":
            return {}
        return {"momentum": self.momentum if self.embedding_momentum is None else self.embedding_momentum}


class TrainingConfig(Section):
    """The training loop: epochs, batches, validation, early stopping, precision, checkpoints."""

    epochs: int = Field(default=20, ge=1)
    batch_size: int = Field(default=2048, ge=2)
    accumulate: int = Field(default=1, ge=1)
    """Parts in which a step takes its batch, one after another, for one update by their mean gradient: a part's memory
    for the batch's gradient. Negatives of the batch are those of the part."""
    patience: int | None = Field(default=None, ge=0)
    """Stops when the validation metric has not risen for this many evaluations; 0 never does. By default 5 where the
    rates are constant, and never where a schedule lets them fall. The best evaluation's weights are kept."""
    evaluate_every: int = Field(default=1, ge=1)
    """Epochs between validations. Each takes the best of λ = 0, ½ and 1, the whole grid follows at the end."""
    refit: bool = False
    """After epochs and λ are chosen on valid, train again on train + valid for as many epochs."""
    precision: Literal["float32", "mixed_bfloat16"] = "float32"
    """`mixed_bfloat16` computes MLPs and logits in bfloat16 while training; tables, losses and the finished
    model stay float32."""
    checkpoint_steps: int = Field(default=1000, ge=1)
    """Steps between checkpoints; one more is written after every epoch."""
    devices: Literal["one", "all"] = "one"
    """`all` computes a step on every device that JAX finds (`CUDA_VISIBLE_DEVICES` says which): each takes an equal
    part of a batch and of every table's rows. Negatives are those of the whole batch, figures those of one device but
    for the order of sums. Needs the JAX backend, which `longtail-train` then chooses. A run may go on with another
    number of devices."""
    processes: int = Field(default=1, ge=1)
    """Processes that train together, one on each host, started alike (`longtail-train fit --coordinator`)."""

    def _problems(self) -> Iterator[str]:
        if self.batch_size % self.accumulate or self.batch_size < 2 * self.accumulate:
            yield f"accumulate: expected equal parts, of at least 2 pairs, of batch_size = {self.batch_size}"
        if self.processes > 1 and self.devices == "one":
            yield f'processes: expected devices = "all" with {self.processes}, received devices = "one"'


DialValue = Annotated[float, Field(ge=-1, le=2)]
"""λ or μ within the limits that a bundle lets requests choose from."""


class PropensityConfig(Section):
    """Chance that a relevant label was labelled at all, by its frequency [Jain et al. 2016].

    1 / p_y = 1 + C (N_y + b)^−a, with C = (ln N − 1)(b + 1)^a, of N training queries N_y with label y.
    """

    a: float = Field(default=0.55, ge=0)
    """0.6 for Amazon, 0.5 for Wikipedia data."""
    b: float = Field(default=1.5, gt=0)
    """2.6 for Amazon, 0.4 for Wikipedia data."""


BaselineName = Literal["popularity", "recent popularity", "item-kNN", "RP3beta", "EASE", "iALS"]


class MetricConfig(Choice):
    """A metric of one's own: a registered name and its parameters."""

    registry: ClassVar[str] = "metric"


class RelativeFloor(Section):
    """A least value of a metric, as a share of what it is at another setting of λ."""

    times: float = Field(gt=0)
    """1.5: half as much again."""
    bias_removal: DialValue | None = None
    """λ of that setting, at μ = 0 and on the recipe's grid; the λ where the metric is highest if not given."""

    def __str__(self) -> str:
        at = "its best" if self.bias_removal is None else f"that at λ = {self.bias_removal:g}"
        return f"{self.times:g} × {at}"


class EvaluationConfig(Section):
    """The evaluation: metrics, the grids of λ and μ, and buckets, always over the full catalogue."""

    ks: list[int] = Field(default=[10, 20, 50, 100], min_length=1)
    metric: str = "recall@20"
    """Chosen on valid: early stopping and the default λ go by it. Recall may be that of a bucket, `recall@20/tail`."""
    metrics: list[MetricConfig] = Field(default_factory=list)
    """Metrics of one's own to measure beside ours, by the names they were registered under."""
    bias_removal: list[DialValue] = Field(default=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0], min_length=1)
    """The grid of λ, the strength of log ν. Where the training implies the same noise ν for every label, λ changes
    nothing and only 0 is measured."""
    popularity: list[DialValue] | None = Field(default=None, min_length=1)
    """The grid of μ, the strength of log π; by default the numbers of `bias_removal`. Where ν is π, μ is λ once more,
    and `fit` says so."""
    default_bias_removal: DialValue | None = None
    """λ served by default when there is no valid split to choose it on. By default what undoes the training in theory:
    1, ½ for `exponential`, 0 where the loss leaves nothing that a λ could undo [METHODS §9]."""
    floor: dict[str, Annotated[float, Field(ge=0, le=1)] | RelativeFloor] = Field(default_factory=dict)
    """Least recall of a bucket on valid, at the k of `metric`: `{ tail = 0.02 }`; or of any metric that is better
    higher: `{ "ndcg@20" = 0.1, "exposure@20/tail" = 0.05 }`. Relative to another setting it is a table:
    `{ tail = { times = 1.5, bias_removal = 1.0 } }`, of the best on the grid `{ "recall@20" = { times = 0.99 } }`. The
    default λ, then μ, is the best of those that reach all floors; where none does, the nearest, with a warning."""
    target_prior: Literal["train", "uniform"] | Path | None = None
    """Chooses λ and μ for pairs whose labels are drawn otherwise than valid's: `uniform`, every label alike, or a table
    of `label` and `share`, a path relative to the recipe. Valid's pairs then weigh π*_y / π_y; `train` weighs them
    alike, every pair and not every query. Epochs still go by `metric`."""
    baselines: list[BaselineName] = Field(
        default=["popularity", "recent popularity", "item-kNN", "RP3beta", "EASE", "iALS"]
    )
    """Reported with the model, of the same pairs, queries and labels; none with `[]`. `recent popularity` counts the
    latest share of the training pairs, the share chosen on valid. The others are skipped where they would take minutes,
    `EASE` beyond 20,000 labels, and the report says so."""
    tune_baselines: bool = False
    """Chooses on valid the neighbours and shrinkage of `item-kNN`, the neighbours and powers of `RP3beta`, the
    regularisation of `EASE`, and the confidence and regularisation of `iALS`."""
    groups: list[str] = Field(default_factory=list)
    """Columns whose values make groups of queries, such as `country`: from `data.queries`, or from a feature with
    `from = "row"`. Figures at the default λ and μ are reported for each of the 20 most frequent values. They are also
    reported for queries without a known pair (`new`), with up to the median number (`few`), and with more (`many`)."""
    exclude_seen: bool = True
    """Leave a query's training labels out of its ranking."""
    buckets: Literal["quantile", "count"] = "quantile"
    """Head/torso/tail at the 66 % and 33 % quantile of label counts, or at 100 and 20 pairs."""
    log_likelihood: bool = False
    """Also measure the predictive log-likelihood, log softmax(s_λ) of each held-out pair, in nats: at the λ where
    scores are log-probabilities. A loss without one is refused [METHODS §2.1]."""
    bootstrap: int = Field(default=200, ge=10)
    """Resamples behind each interval."""
    propensity: PropensityConfig | None = None
    """Adds `psp@k` and `psndcg@k`, precision and nDCG that count a label by its inverse propensity."""

    def _problems(self) -> Iterator[str]:
        own = [metric.name for metric in self.metrics]
        for key, names in (("baselines", self.baselines), ("metrics", own), ("groups", self.groups)):
            if len(set(names)) < len(names):
                yield f"{key}: expected distinct names, received {names}"
        if any(k < 1 for k in self.ks):
            yield f"ks: expected values >= 1, received {self.ks}"
        if self.target_prior is not None and self.floor:
            yield "target_prior: expected no floor with it"
        if unknown := [name for name in self.floor if name not in BUCKET_NAMES and not self._is_metric(name, _FLOORS)]:
            yield (
                f"floor: expected buckets of {', '.join(BUCKET_NAMES)}, or metrics such as 'ndcg@{self.ks[0]}' and "
                f"'exposure@{self.ks[0]}/tail', received {', '.join(sorted(unknown))}"
            )
        for name, least in self.floor.items():
            at = least.bias_removal if isinstance(least, RelativeFloor) else None
            if at is not None and at not in self.bias_removal:
                yield f"floor: {name}: expected one of bias_removal = {self.bias_removal}, received {at}"
        if not self._is_metric(self.metric, ("recall",)):
            known = "|".join((*_RATIOS, *own))
            yield f"metric: expected {known} or recall of a bucket, @ one of {self.ks}, received {self.metric!r}"
        for name in (self.metric, *self.floor):
            if name.partition("@")[0] in ("psp", "psndcg") and self.propensity is None:
                yield f"metric: expected evaluation.propensity with {name!r}, received none"

    def _is_metric(self, metric: str, of_buckets: Sequence[str]) -> bool:
        """Return whether that is measured and better higher; `of_buckets` may be of a bucket."""
        name, _, at = metric.partition("@")
        k, bucketed, bucket = at.partition("/")
        if k not in map(str, self.ks):
            return False
        if bucketed:
            return name in of_buckets and bucket in BUCKET_NAMES
        return name in (*_RATIOS, *(own.name for own in self.metrics)) or (name == "coverage" and name in of_buckets)

    @property
    def k(self) -> str:
        """K of the metric that is chosen by."""
        return k_of(self.metric)

    @property
    def measure(self) -> str:
        """Name what temperature and epochs are chosen by on valid: the metric, or recall under the target prior."""
        prior = self.target_prior
        return self.metric if prior is None else f"recall@{self.k} under the target prior {prior}"

    @property
    def floors(self) -> dict[str, float | RelativeFloor]:
        """Return what is asked of every metric that has a floor, by its full name."""
        return {f"recall@{self.k}/{name}" if name in BUCKET_NAMES else name: it for name, it in self.floor.items()}
