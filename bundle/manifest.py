"""Define manifest.json, the description of a bundle, so that loading needs no arguments."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from longtail.bundle.dates import DatePart, utc
from longtail.bundle.events import weights_by_type
from longtail.bundle.frequency import Buckets
from longtail.bundle.one_line import one_line

SCHEMA_VERSION = 1

BonusBucket = Literal["torso", "tail", "new"]
BONUS_BUCKETS: tuple[BonusBucket, ...] = get_args(BonusBucket)
"""Buckets that have a bonus; the head has none, as a bonus of all labels changes no order."""
TextStandard = Literal["none", "lower", "strip_punctuation", "lower_and_strip_punctuation"]
FeatureKind = Literal["id", "history", "audience", "bag", "text", "number", "vector", "date"]
FEATURE_VALUE_TYPES = {
    "id": "an id (a string, number or boolean)",
    "history": "a list of ids (strings, numbers or booleans), oldest first",
    "audience": "a list of ids (strings, numbers or booleans) of queries that chose the label",
    "bag": "a list of ids (strings, numbers or booleans), or an object of id to weight",
    "text": "a string",
    "number": "a finite number",
    "vector": "a list of finite numbers",
    "date": 'a date or time in ISO 8601, such as "2026-11-22T08:30:00Z"',
}
"""Descriptions of the values that a request may give for a feature, by `Feature.kind`."""


class Record(BaseModel):
    """Base of the records of a manifest: immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    __repr__ = __str__ = one_line


class Feature(Record):
    """One named input of a tower.

    | kind | value in a request | tower inputs |
    |---|---|---|
    | `id` | a string, a number or a boolean | `name` int32 [B] |
    | `history` | ids, oldest first; the last `max_length` count | `name` int32, `name__weight` float32 [B, P] |
    | `audience` | ids of queries that chose the label, all of which count | the same |
    | `bag` | a list of ids, an object id → weight, or a string of ids joined by `separator` | the same |
    | `text` | a string, split into words by `tokenize`, hashed | the same |
    | `text` with a vocabulary | a string, split at spaces after `standardize`, looked up | the same |
    | `number` | a number | `name` float32 [B]; with `boundaries`, its range, `name` int32 [B] |
    | `vector` | a list of `dims` numbers | `name` float32 [B, dims], `name__missing` float32 [B] |
    | `date` | an ISO 8601 string | `name` int32 [B, parts] |

    A missing feature or null becomes the out-of-vocabulary row, an empty bag, or the number `missing`. For vectors, and
    for numbers whose `missing` is null, it becomes zeros, and 1 in the input `name__missing`.
    """

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")
    kind: FeatureKind
    vocabulary: str | None = None
    """Name of the file in `vocabularies/`, without its ending; for id, history, audience and bag, and for a text
    without `hash_rows`."""
    max_length: int | None = Field(default=None, ge=1)
    """Most entries of a history, bag or token list that are read: the last ones, or the first of a text with a
    vocabulary."""
    separator: str | None = Field(default=None, min_length=1)
    """Separator of ids in a bag that is given as a string."""
    hash_rows: int | None = Field(default=None, ge=2)
    """Rows of a text feature's table; row 0 is the out-of-vocabulary row."""
    standardize: TextStandard | None = None
    """For a text with a vocabulary: standardisation before the split at spaces, like in Keras' TextVectorization."""
    missing: float | None = 0.0
    """Value in place of a missing number: the training mean. Null if the tower has an input for missing values."""
    boundaries: list[float] | None = None
    """For a number that is looked up by its range: ascending boundaries. Numbers below the first get row 1, numbers
    from the last on the last row, and missing ones row 0."""
    dims: int | None = Field(default=None, ge=1)
    """Number of coordinates of a vector."""
    parts: list[DatePart] | None = Field(default=None, min_length=1)
    """Parts of a date in the order of the input's columns; `bundle/dates.py` has the rows."""
    reference: datetime | None = None
    """Reference time of a date's `age`, UTC."""

    @property
    def inputs(self) -> dict[str, tuple[str, tuple[int | None, ...]]]:
        """Return the tower's inputs for this feature: dtype and shape by name; None: a length of the batch."""
        if self.kind == "id" or self.boundaries is not None:
            return {self.name: ("int32", (None,))}
        if self.kind == "date":
            return {self.name: ("int32", (None, len(self.parts or ())))}
        if self.kind in ("number", "vector"):
            inputs: dict[str, tuple[str, tuple[int | None, ...]]] = {
                self.name: ("float32", (None,) if self.kind == "number" else (None, self.dims))
            }
            return inputs | ({f"{self.name}__missing": ("float32", (None,))} if self.missing is None else {})
        return {self.name: ("int32", (None, None)), f"{self.name}__weight": ("float32", (None, None))}

    @property
    def expects(self) -> str:
        """Describe the values that a request may give for this feature."""
        value = FEATURE_VALUE_TYPES[self.kind].replace("finite numbers", f"{self.dims} finite numbers")
        if self.separator is not None:
            value += f", or a string of ids with {self.separator!r} between them"
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        text, of_words = self.kind == "text", self.standardize is not None
        needed = {
            "dims belongs to vector": (self.dims, self.kind == "vector"),
            "parts belongs to date": (self.parts, self.kind == "date"),
            "reference belongs to date": (self.reference, self.kind == "date"),
            "max_length belongs to history, bag and text": (self.max_length, self.kind in ("history", "bag", "text")),
            "hash_rows belongs to text without standardize": (self.hash_rows, text and not of_words),
            "vocabulary belongs to id, history, audience, bag and text with standardize": (
                self.vocabulary,
                self.kind in ("id", "history", "audience", "bag") or (text and of_words),
            ),
        }
        allowed = {
            "separator belongs to bag": (self.separator, self.kind == "bag"),
            "boundaries belongs to number": (self.boundaries, self.kind == "number"),
            "standardize belongs to text with a vocabulary": (self.standardize, text and self.vocabulary is not None),
        }
        broken = [rule for rule, (value, fits) in needed.items() if fits != (value is not None)]
        broken += [rule for rule, (value, fits) in allowed.items() if value is not None and not fits]
        broken = [f"{rule}, and only to it" for rule in broken]
        if (self.kind == "vector" and self.missing is not None) or (
            self.missing is None and self.kind not in ("number", "vector")
        ):
            broken.append("missing = null belongs to vector, may stand with number, and with no other kind")
        if broken:
            raise ValueError(f"feature {self.name!r} ({self.kind}): {'; '.join(broken)}")
        return self


class Loss(Record):
    """Sampler, weight and loss of training [METHODS §2]."""

    family: str
    sampler: str
    weight: str


class Interval(Record):
    """A figure with its 95 % bootstrap interval over queries; null bounds if undefined (coverage, Gini)."""

    value: float
    low: float | None = None
    high: float | None = None


class CurvePoint(Record):
    """Offline metrics at one λ, μ, ω and β.

    `metrics` names are `METRIC@K` over all queries, or `METRIC@K/BUCKET`.
    """

    bias_removal: float
    popularity: float = 0.0
    cooccurrence: float = 0.0
    bonus: dict[str, float] = {}
    """β by bucket, without zeros."""
    metrics: dict[str, Interval]


class Popularity(Record):
    """The dial μ: default weight of log π for requests that set none, and its limits."""

    default: float = 0.0
    minimum: float = -1.0
    maximum: float = 2.0

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        if not self.minimum <= self.default <= self.maximum:
            raise ValueError(
                f"default of a dial: expected {self.minimum} <= default <= {self.maximum}, received {self.default}"
            )
        return self


class Bonus(Popularity):
    """The dial β of a bucket: default bonus of its labels, and its limits [METHODS §12]."""

    minimum: float = -5.0
    maximum: float = 5.0


class BiasRemoval(Popularity):
    """The dial λ: default for requests that set none, its limits, and offline metrics by λ."""

    default: float
    noise: str = "π"
    """Description of the noise ν whose logarithm λ multiplies [METHODS §9]: `π` is the label frequency, `p_n(y|x)` the
    tree. With a tree the description also has the tree's power in ν, 0 if training left none of it, and the remaining
    factors of ν, which belong to μ."""
    chosen_by: str = "the recipe, for want of validation data"
    """Split and metric that picked the default, e.g. `valid recall@20`."""
    curve_split: str = "none"
    """Split that the curve was measured on."""
    curve: list[CurvePoint] = []


class LogColumns(Record):
    """Columns of a log of later pairs, and its types of events."""

    query_id: str = "query_id"
    label_id: str = "label_id"
    timestamp: str = "time"
    ticks: float = Field(default=1.0, gt=0)
    """Units of a numeric `timestamp` per second."""
    event: str | None = None
    """Column of types of events; null where the log has none."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the types; pairs of types that are not named do not count. Empty: all pairs weigh 1."""
    negative: list[str] = Field(default_factory=list)
    """Types that say no to a label, such as a return."""
    weight: str | None = None
    """Column of weights that multiply those of the types; null for none."""

    @property
    def by_type(self) -> dict[str, float]:
        """Return the weight of every type, for `event_weights`."""
        return weights_by_type(self.weights, self.negative)


_WITHOUT_TOWERS = 3.0
"""ω without towers; of 2, 3 and 6 none is better on all five logs of benchmarks/RESULTS.md."""


class CooccurrenceSettings(Popularity):
    """The dial ω: default weight of c, its limits, and how W and c are made [METHODS §11]."""

    default: float
    minimum: float = 0.0
    maximum: float = Field(gt=0)
    kind: Literal["walk", "cosine", "next", "mixed"]
    power: float = Field(default=0.0, ge=0)
    """β, the power of a neighbour's degree that divides W; `cosine` has ½."""
    steps: int = Field(default=5, ge=1)
    """Steps within which a label follows another, for `next`."""
    step_decay: float = Field(default=0.6, gt=0, le=1)
    """δ, the factor of every further step, for `next`."""
    neighbours: int = Field(default=20, ge=1)
    """N, the most neighbours of a label."""
    last: int = Field(ge=1)
    """R, the last entries of a history that count."""
    decay: float = Field(gt=0, le=1)
    """γ, the factor of every older entry."""
    mean: bool = False
    """Whether c is divided by the sum of the entries' factors."""
    scale: float = Field(default=1.0, gt=0)
    """Factor of W, so that ω is of the order of 1."""
    until: float | None = None
    """Time of the last pair in W, in seconds since 1970; null without times."""
    log: LogColumns = LogColumns()

    def without_towers(self, weight: float) -> float:
        """Return ω of a query of which the towers know nothing: c, of standard deviation ½, must tell labels apart."""
        return max(weight, min(_WITHOUT_TOWERS, self.maximum)) if weight else 0.0


class FileRecord(Record):
    """Size and checksum of one file."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Manifest(Record):
    """The whole of manifest.json; FORMAT.md explains it."""

    schema_version: int
    name: str
    created_at: datetime
    labels: int = Field(ge=1)
    dim: int = Field(ge=1)
    similarity: Literal["dot", "cosine"]
    centre: list[float] | None = None
    """Vector [dim] by which labels are moved; a query's vector is moved by it after the tower. Null: no move."""
    temperature: float = Field(gt=0)
    label_bias: bool
    kappa: float = Field(gt=0)
    kappa_bias: float | None = Field(default=None, gt=0)
    kappa_popularity: float | None = Field(default=None, gt=0)
    """Scale of the coordinate of log π. Null if log p_n is log π: one coordinate then holds λ + μ; with a tree the sum
    applies to similar labels alone, as the tree's λ has no coordinate."""
    loss: Loss
    query_features: list[Feature]
    label_features: list[Feature] = []
    own_id: str | None = None
    """The label feature whose value is the label's id; null without one."""
    exclude_history: bool = False
    """Whether answers exclude the labels of a query's histories by default, like the evaluation did."""
    display: list[str] = []
    """The user's own columns of labels.arrow, which answers show."""
    buckets: Buckets
    bias_removal: BiasRemoval
    popularity: Popularity = Popularity()
    cooccurrence: CooccurrenceSettings | None = None
    """The term of co-occurrence; null without one."""
    bonus: dict[BonusBucket, Bonus] = {bucket: Bonus() for bucket in BONUS_BUCKETS}
    """The dials β by bucket: torso, tail and new."""
    training_data: dict[str, str | int]
    software: dict[str, str]
    files: dict[str, FileRecord] = {}

    @property
    def default_point(self) -> CurvePoint:
        """Return the curve's point at the default dials; one without metrics if it was not measured."""
        default = CurvePoint(
            bias_removal=self.bias_removal.default,
            popularity=self.popularity.default,
            cooccurrence=0.0 if self.cooccurrence is None else self.cooccurrence.default,
            bonus={bucket: dial.default for bucket, dial in self.bonus.items() if dial.default},
            metrics={},
        )
        curve = self.bias_removal.curve
        return next((point for point in curve if point.model_copy(update={"metrics": {}}) == default), default)

    def in_words(self) -> str:
        """Describe the model and its metric in a few words."""
        point, metric = self.default_point, self.bias_removal.chosen_by.rpartition(" ")[2]
        measured = point.metrics.get(metric)
        value = "" if measured is None else f", {metric} {measured.value:.4f}"
        words = dial_words(point.bias_removal, point.popularity, point.cooccurrence, point.bonus)
        return f"{self.name[:60]!r}, {self.labels:,} labels, d = {self.dim}{value} at {words}"

    def __repr__(self) -> str:
        return f"Manifest({self.in_words()})"

    __str__ = __repr__

    @property
    def data_until(self) -> datetime:
        """Return the time when the training data was read, UTC (`training_data.read_at`).

        Bundles without this entry return the time of their creation.
        """
        read_at = self.training_data.get("read_at")
        return utc(self.created_at if read_at is None else datetime.fromisoformat(str(read_at)))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.label_bias != (self.kappa_bias is not None):
            raise ValueError("kappa_bias belongs to a bundle with label_bias, and only to it")
        if self.centre is not None and len(self.centre) != self.dim:
            raise ValueError(f"centre: expected {self.dim} numbers, received {len(self.centre)}")
        names = [feature.name for feature in self.query_features]
        if len(set(names)) != len(names):
            raise ValueError(f"query_features: expected distinct names, received {names}")
        if set(self.bonus) != set(BONUS_BUCKETS):
            raise ValueError(f"bonus: expected {', '.join(BONUS_BUCKETS)}, received {', '.join(self.bonus) or 'none'}")
        return self


def dial_words(
    bias_removal: float, popularity: float, cooccurrence: float = 0.0, bonus: Mapping[str, float] | None = None
) -> str:
    """Describe a setting, such as `λ = 0.5`; all but λ only if not 0."""
    others = {"μ": popularity, "ω": cooccurrence} | {f"β {bucket}": value for bucket, value in (bonus or {}).items()}
    return f"λ = {bias_removal:g}" + "".join(f", {name} = {value:g}" for name, value in others.items() if value)
