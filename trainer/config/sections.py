"""The recipe tables `[data]`, `[prior]`, `[cooccurrence]`, `[optimizer]`, `[training]` and `[evaluation]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ByteSize, Field

from longtail.bundle import BUCKET_NAMES
from longtail.trainer.config.base import RowChoice, Section
from longtail.trainer.config.rows import EventsConfig, Since, Sources, Span
from longtail.trainer.metric_registry import parse_k
from longtail.trainer.optimizers import ROW_OPTIMIZERS

SOURCE_KEYS = ("train", "valid", "test", "queries", "labels", "prepared")
"""Keys of `data` that name files or folders."""
_RATIOS = ("recall", "ndcg", "precision", "hit_rate", "mrr", "psp", "psndcg")
_FLOORS = ("recall", "coverage", "exposure")
"""Metrics of a bucket for which higher values are better."""


class SplitConfig(Section):
    """Cut interactions into train, valid and test without files for these."""

    strategy: Literal["random", "random_per_query", "temporal", "temporal_per_query", "leave_last_out"]
    """`random` holds out random pairs, by seed. `random_per_query` holds out a share of every query's pairs, by seed.
    `temporal` holds out the latest pairs of all; pairs of one time stay together.
    `temporal_per_query` holds out the latest pairs of every query.
    `leave_last_out` tests on the last pair of every query and validates on the one before. The last two strategies use
    file order if there is no timestamp."""
    valid: float = Field(default=0.1, ge=0, lt=1)
    """Share of valid pairs, among all pairs or among each query's pairs, rounded. `leave_last_out` ignores it, as does
    a recipe with a valid file."""
    test: float = Field(default=0.1, ge=0, lt=1)
    """Share of test pairs, as for `valid`. `leave_last_out` ignores it, as does a recipe with a test file."""

    def _problems(self) -> Iterator[str]:
        if self.valid + self.test >= 1:
            yield f"split: expected valid + test < 1, received {self.valid} + {self.test}"


class DataConfig(Section):
    """Name the files of interactions and feature tables, and the rows that count.

    A source is a file, a directory (every file below it), a glob such as `logs/2026-*/*.parquet`, a URL such as
    `s3://bucket/logs/` (the extra `remote`), or a list of these, relative to the recipe. Files are read in the order of
    the list, then by name. Folders named `key=value` give every file below them a column `key`.
    """

    train: Sources
    valid: Sources | None = None
    test: Sources | None = None
    query_id: str = "query_id"
    label_id: str = "label_id"
    timestamp: str | None = None
    """Number or timestamp column that orders a query's interactions."""
    weight: str | None = None
    """Column of finite weights ≥ 0 that scale each pair's loss. π counts pairs by weight. Buckets, the `count` of a
    label and metrics ignore weights. Files of exported feedback without the column `debiased_weight` get weight 1."""
    impressions: str | None = None
    """Column with lists of label ids (strings or integers) that were shown with the row, chosen or not.
    `loss.impressions` uses the labels that were not chosen as negatives. Ids outside the catalogue are ignored. Files
    of exported feedback without the column `impressions` are accepted."""
    events: EventsConfig | None = None
    """Weights by event type. They multiply `weight` if both are set."""
    since: Since | None = None
    """Reads only interactions from a time on, such as `2026-01-31`, or from a span before the newest, such as `30d`."""
    max_bad_rows: int | float = Field(default=0, ge=0)
    """Largest number of bad rows that are skipped, counted and listed: an integer is a count, any other number a share
    of the rows read. With more bad rows the data are refused, and all bad rows are reported at once. A row is bad with
    a null or empty id, a time or weight that is no finite number, a weight < 0, an event type without a weight, a
    placeholder, an id that occurs twice in a feature table, or a time that cannot be true: before 1990, in the future,
    or in another unit than most of its file."""
    placeholders: list[str] = Field(default_factory=list)
    """Ids that stand for a missing id, such as `undefined`; rows with one are bad. Suspicious ids that are not listed
    here are reported."""
    repeats: Literal["keep", "drop"] = "keep"
    """Treatment of repeated pairs. `drop` keeps the latest of each pair within a split, with the largest weight."""
    queries: Sources | None = None
    """Feature table of queries, keyed by `query_id`."""
    valid_from: str | None = None
    """Column of the query table with the time from which a row's attributes hold, of the same type as `timestamp`. A
    query then has one row per change. An interaction reads the query's latest row that is not later than the
    interaction; before the first row all attributes are missing."""
    labels: Sources | None = None
    """Feature table of labels, keyed by `label_id`. Labels of this table join the catalogue even without a pair."""
    display: list[str] = Field(default_factory=list)
    """Columns of the label table that answers of the service include, such as a title."""
    reduction: Literal["expand", "sample", "smallest"] = "expand"
    """Training pairs of a query with several labels. `expand` makes one pair per label [R21 §5.2]. `sample` visits
    every training query once per epoch, with one of its labels drawn uniformly [Re19 §5]; held-out queries keep all
    labels, and label frequencies count visits. `smallest` keeps the smallest label id of every query, in every file,
    before a split is cut; other labels leave the catalogue unless `labels` lists them [BM20 A.2]."""
    split: SplitConfig | None = None
    prepared: Path | None = None
    """Folder for the parsed data set. `longtail-train prepare` or the first job writes it; later jobs memory-map it
    until a file or a setting that affects reading changes. It may be removed at any time."""
    memory: ByteSize = Field(default=ByteSize(4_000_000_000), ge=64_000_000)
    """Memory limit of reading, such as `4G`, if `prepared` names a folder; DuckDB spills the rest to that folder."""

    @property
    def ordered(self) -> bool:
        """Return whether a query's pairs are in time order."""
        by_file = ("temporal_per_query", "leave_last_out")
        return self.timestamp is not None or (self.split is not None and self.split.strategy in by_file)

    def _problems(self) -> Iterator[str]:
        if self.timestamp is None and self.since is not None:
            yield "since: expected data.timestamp with it, received none"


class PriorConfig(Section):
    """Choose the prior π*, whose logarithm μ (`popularity` in a request) multiplies [METHODS §6]."""

    kind: Literal["count", "decayed", "forecast"] = "count"
    """`count` uses π, the labels' shares of the training pairs. `decayed` weighs pairs less with age, by the half-life
    of highest likelihood. `forecast` predicts the shares over the next horizon by a regression on earlier parts of the
    log."""
    horizon: Span | None = None
    """Time until the next model or refreshed prior, such as `7d`; by default the length of the held-out period."""
    features: list[str] = Field(default_factory=list)
    """Label features that the regression reads: single ids, such as a category, and numbers."""
    since: str | None = None
    """Column of the label table with the date from which a label is available. Before this date its π* is 0."""

    def _problems(self) -> Iterator[str]:
        if self.kind != "forecast" and self.features:
            yield f"features: expected none with kind = {self.kind!r}, received {self.features}"
        if self.kind == "count" and (self.horizon or self.since):
            yield "horizon and since: expected none with kind = 'count'"


class CooccurrenceConfig(Section):
    """Add what was chosen together with a query's last labels to the score [METHODS §11].

    Valid chooses kind, powers, the reading of a history and ω. Where the gain on valid is within chance, ω is 0 but for
    requests that set it. `[cooccurrence]` alone takes all defaults.
    """

    kinds: list[Literal["walk", "cosine", "next", "mixed"]] = Field(default=["walk", "next", "mixed"], min_length=1)
    """`walk` goes from a label over its queries to another label (RP3beta), `cosine` compares the queries of two
    labels, `next` counts what follows a label within five steps, `mixed` adds `walk` and `next`. Another kind than
    `mixed` must be 1 % better. Data without an order have neither of the last two."""
    weights: list[Annotated[float, Field(ge=0)]] = Field(
        default=[0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0], min_length=1
    )
    """The grid of ω. At ω = 1 the term's standard deviation over labels is ½, in the mean over queries."""
    remember: int | None = Field(default=None, ge=0, le=1000)
    """Last labels of every query that the bundle keeps, for requests that give a query's id alone. By default 50 if the
    query tower reads no history, otherwise 0."""


class OptimizerConfig(Section):
    """Choose the optimizers: sparse ones for embedding tables, those of Keras for dense parameters."""

    embeddings: str = "adam"
    """`adam`: lazy Adam, which updates moments of touched rows only. `adagrad`: one accumulator per row.
    `adagrad_elementwise`: one accumulator per number, as in [BM20]. `sgd`: gradient descent, as in [R21] and [Re19];
    the velocity of an untouched row does not change."""
    dense: Literal["adam", "adagrad", "sgd"] = "adam"
    """Optimizer of the MLPs and of a learned temperature; `adagrad` has one accumulator per number."""
    embedding_learning_rate: float = Field(default=0.01, gt=0)
    dense_learning_rate: float = Field(default=0.001, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of `sgd`, for embeddings and dense parameters; [R21] uses 0.9."""
    embedding_momentum: float | None = Field(default=None, ge=0, lt=1)
    """Momentum of `embeddings = "sgd"` if it differs from `momentum`; [Re19] uses 0 for embeddings and momentum for the
    dense layer."""
    l2: float = Field(default=0.0, ge=0)
    """Minimises the loss + l2·‖θ‖², where θ are all embedding rows and all dense parameters except a learned
    temperature. Each step adds 2·l2·θ to the gradient of dense parameters. A touched row gets this term once for every
    step since its last update; rows that no step touches keep their values. The printed loss excludes the penalty. A
    weight decay of w, as in [R21], is l2 = w / 2. `loss.regularizer` penalises scores instead."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of both learning rates: `linear` and `cosine` fall to 0 by the end of the last of `epochs`."""
    average: float | None = Field(default=None, gt=0, lt=1)
    """Validates and serves the exponential moving average of the weights over steps. `average` is the decay per step:
    0.999 averages over about a thousand steps."""

    def _problems(self) -> Iterator[str]:
        if self.embeddings not in ROW_OPTIMIZERS:
            yield f"embeddings: expected one of {', '.join(ROW_OPTIMIZERS)}, received {self.embeddings!r}"
        if self.momentum and "sgd" not in (self.embeddings, self.dense):
            yield f"momentum: expected 0 where neither embeddings nor dense is sgd, received {self.momentum}"
        if self.embedding_momentum is not None and self.embeddings != "sgd":
            yield f"embedding_momentum: expected none with embeddings {self.embeddings!r}"


class TrainingConfig(Section):
    """Configure the training loop: epochs, batches, validation, early stopping, precision, checkpoints."""

    epochs: int = Field(default=20, ge=1)
    batch_size: int = Field(default=2048, ge=2)
    periods: int = Field(default=1, ge=1)
    """Cuts the time of the training pairs into periods of equal numbers of pairs; a batch holds pairs of one period.
    In-batch negatives then have the popularity of that time, and the towers do not learn what passes. 1: no periods."""
    accumulate: int = Field(default=1, ge=1)
    """Number of equal parts of a batch for gradient accumulation. A step processes the parts one after another and
    updates once, by the mean gradient, which saves memory. In-batch negatives come from the same part only."""
    patience: int | None = Field(default=None, ge=0)
    """Stops after this many evaluations without a rise of the validation metric; 0 trains all epochs. The default is 5
    with constant learning rates and 0 with a schedule. The weights of the best evaluation are kept."""
    evaluate_every: int = Field(default=1, ge=1)
    """Epochs between validations. Each reports the best of λ = 0, ½ and 1; the whole grid is measured at the end."""
    refit: bool = False
    """Trains again on train + valid, for the chosen number of epochs, once epochs and λ are chosen on valid."""
    precision: Literal["float32", "mixed_bfloat16"] = "float32"
    """`mixed_bfloat16` computes MLPs and logits in bfloat16 during training. Tables, losses and the finished model stay
    float32."""
    checkpoint_steps: ClassVar[int] = 1000
    """Steps between checkpoints. One more checkpoint is written after every epoch."""
    devices: Literal["one", "all"] = "one"
    """`all` uses every device that JAX finds: each device takes an equal part of a batch and of every table's rows.
    Rows still use negatives of the whole batch, so results equal those of one device up to the order of sums.
    `longtail-train` then chooses the JAX backend. A run may resume with another number of devices."""
    processes: int = Field(default=1, ge=1)
    """Number of processes that train together, one on each host, started with the same command
    (`longtail-train fit --process`)."""

    def _problems(self) -> Iterator[str]:
        if self.batch_size % self.accumulate or self.batch_size < 2 * self.accumulate:
            yield f"accumulate: expected equal parts, of at least 2 pairs, of batch_size = {self.batch_size}"
        if self.processes > 1 and self.devices == "one":
            yield f'processes: expected devices = "all" with {self.processes}, received devices = "one"'


DialValue = Annotated[float, Field(ge=-1, le=2)]
"""A λ or μ within the limits of a bundle."""


BaselineName = Literal[
    "popularity", "recent popularity", "attribute share", "item-kNN", "RP3beta", "EASE", "Turbo-CF", "iALS"
]


class MetricConfig(RowChoice):
    """Name a custom metric: its registered name and parameters."""

    registry: ClassVar[str] = "metric"


class RelativeFloor(Section):
    """Require a multiple of a metric's value at another λ."""

    times: float = Field(gt=0)
    """The multiple: 1.5 requires 50 % more than at the other λ."""
    bias_removal: DialValue | None = None
    """The other λ, at μ = 0 and on the recipe's grid. By default the λ at which the metric is highest."""

    def __str__(self) -> str:
        reference = "its best" if self.bias_removal is None else f"that at λ = {self.bias_removal:g}"
        return f"{self.times:g} × {reference}"


class EvaluationConfig(Section):
    """Configure the evaluation, always over the full catalogue: metrics, buckets, grids of λ and μ."""

    ks: list[int] = Field(default=[10, 20, 50, 100], min_length=1)
    metric: str = "recall@20"
    """Validation metric for early stopping and for the default λ. It may be the recall of a bucket,
    `recall@20/tail`."""
    metrics: list[MetricConfig] = Field(default_factory=list)
    """Custom metrics to measure in addition, by their registered names."""
    bias_removal: list[DialValue] = Field(default=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0], min_length=1)
    """The grid of λ, the strength of log ν; a single value fixes λ. Without a valid split to choose λ, the default is
    the λ that removes the training bias in theory: 1 for most losses, ½ for `exponential`, 0 if the loss leaves no bias
    that λ could remove [METHODS §9]. If training implies the same noise ν for every label, λ has no effect and only 0
    is measured."""
    popularity: list[DialValue] | None = Field(default=None, min_length=1)
    """The grid of μ, the strength of log π; by default the values of `bias_removal`. If ν equals π, μ repeats λ and
    `fit` reports that."""
    floor: dict[str, Annotated[float, Field(ge=0, le=1)] | RelativeFloor] = Field(default_factory=dict)
    """Least values on valid. `{ tail = 0.02 }` bounds the recall of a bucket at the k of `metric`. Any metric for which
    higher is better may have a floor: `{ "ndcg@20" = 0.1, "exposure@20/tail" = 0.05 }`. A table makes a floor relative
    to another λ, `{ tail = { times = 1.5, bias_removal = 1.0 } }`, or to the best λ of the grid,
    `{ "recall@20" = { times = 0.99 } }`. The default is the best setting that reaches all floors: λ, then μ, and for
    floors of torso, tail or new also β, a bonus of these labels [METHODS §12]. If none does, it is the nearest, with a
    warning. Without floors, β of new labels is the best for the metric, if valid has pairs of such labels. Epochs and
    the temperatures of `auto` are compared by the same rule without β, except with `target_prior`."""
    target_prior: Literal["train", "uniform"] | Path | None = None
    """Chooses λ and μ for a target distribution of labels that differs from valid. `uniform` makes every label equally
    likely; a path, relative to the recipe, names a table with columns `label` and `share`. Pairs of valid then have
    weight π*_y / π_y. `train` gives every pair the same weight, rather than every query. Early stopping still uses
    `metric`."""
    baselines: list[BaselineName] = Field(
        default=[
            "popularity",
            "recent popularity",
            "attribute share",
            "item-kNN",
            "RP3beta",
            "EASE",
            "Turbo-CF",
            "iALS",
        ]
    )
    """Baselines reported with the model, on the same pairs, queries and labels; `[]` for none. `recent popularity`
    counts the latest share of the training pairs, and valid chooses the share. `attribute share` multiplies the query's
    share of a label's category by popularity within the category; valid chooses the column of kind `id`, the smoothing,
    and recent popularity or the recipe's prior. Without such a column the default leaves it out. If pairs are in time
    order, `item-kNN`, `RP3beta`, `EASE` and `Turbo-CF` read the `last` pairs of a history, weighed by `decay`^age, age
    0 being the newest; valid chooses both. Without an order or without valid, all pairs of a history count alike.
    A baseline that would take minutes is skipped, and the report says so: `EASE` beyond 20,000 labels, for example."""
    groups: list[str] = Field(default_factory=list)
    """Columns whose values make groups of queries, such as `country`: from `data.queries`, or from a feature with
    `from = "row"`. Figures at the default λ and μ are reported for each of the 20 most frequent values. They are also
    reported for queries without a known pair (`new`), with up to the median number (`few`), and with more (`many`)."""
    history: Literal["fixed", "growing"] = "fixed"
    """History of a query on valid and test. `fixed` reads the pairs before the split, for all of its held-out pairs.
    `growing` finds every held-out pair separately, as the next one after the query's pairs before the split and its
    earlier held-out pairs. Metrics are then means over held-out pairs, so a query with five of them counts five times;
    intervals still resample queries. Use it for sessions that begin after training."""
    least_history: int = Field(default=0, ge=0)
    """Leaves out held-out pairs whose history has fewer pairs, of any event type. With `history = "growing"`, 1 leaves
    out the first pair of a new session, of which nothing is known. `fit` prints their number."""
    exclude_seen: bool = True
    """Excludes the labels of a query's history from the ranking of this query. With `history = "growing"`, labels of
    earlier held-out pairs are excluded too; `false` lets the same label be the next one."""
    buckets: Literal["quantile", "count"] = "quantile"
    """`quantile` cuts head, torso and tail at the 66 % and 33 % quantiles of label counts; `count` cuts at 100 and 20
    pairs."""
    log_likelihood: bool = False
    """Measures the predictive log-likelihood as well: log softmax(s_λ) of each held-out pair, in nats, at the λ where
    scores are log-probabilities. A loss without such a λ is refused [METHODS §2.1]."""
    bootstrap: int = Field(default=200, ge=10)
    """Bootstrap resamples for each interval."""
    propensity: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]] | None = None
    """Constants A and B of the chance p_y that a relevant label was observed [Jain et al. 2016]: `[0.55, 1.5]`, or
    `[0.6, 2.6]` for Amazon and `[0.5, 0.4]` for Wikipedia data. Adds `psp@k` and `psndcg@k`: precision and nDCG that
    weigh a label by 1 / p_y = 1 + C (N_y + B)^−A, with C = (ln N − 1)(B + 1)^A, where N_y of N training queries have
    label y."""

    def _problems(self) -> Iterator[str]:
        custom = [metric.name for metric in self.metrics]
        for key, names in (("baselines", self.baselines), ("metrics", custom), ("groups", self.groups)):
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
            reference = least.bias_removal if isinstance(least, RelativeFloor) else None
            if reference is not None and reference not in self.bias_removal:
                yield f"floor: {name}: expected one of bias_removal = {self.bias_removal}, received {reference}"
        if not self._is_metric(self.metric, ("recall",)):
            metrics = "|".join((*_RATIOS, *custom))
            yield f"metric: expected {metrics} or recall of a bucket, @ one of {self.ks}, received {self.metric!r}"
        for name in (self.metric, *self.floor):
            if name.partition("@")[0] in ("psp", "psndcg") and self.propensity is None:
                yield f"metric: expected evaluation.propensity with {name!r}, received none"

    def _is_metric(self, metric: str, of_buckets: Sequence[str]) -> bool:
        """Return whether a metric is measured and better when higher; `of_buckets` also exist per bucket."""
        name, _, suffix = metric.partition("@")
        k, bucketed, bucket = suffix.partition("/")
        if k not in map(str, self.ks):
            return False
        if bucketed:
            return name in of_buckets and bucket in BUCKET_NAMES
        return name in (*_RATIOS, *(metric.name for metric in self.metrics)) or (
            name == "coverage" and name in of_buckets
        )

    @property
    def k(self) -> str:
        """Return the k of `metric`."""
        return parse_k(self.metric)

    @property
    def measure(self) -> str:
        """Name the validation measure that chooses the temperature and the number of epochs."""
        prior = self.target_prior
        return self.metric if prior is None else f"recall@{self.k} under the target prior {prior}"

    @property
    def floors(self) -> dict[str, float | RelativeFloor]:
        """Return floors by full metric name; a bucket name stands for the recall of this bucket."""
        return {f"recall@{self.k}/{name}" if name in BUCKET_NAMES else name: it for name, it in self.floor.items()}
