"""manifest.json: what a bundle says about itself, so that loading needs no arguments."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from longtail.bundle.dates import DatePart
from longtail.bundle.frequency import Buckets

SCHEMA_VERSION = 1

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
"""What a request may give for a feature, in words, by `Feature.kind`."""


class Record(BaseModel):
    """Base of what a manifest says: no unknown keys, and never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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

    A missing feature or null means: out-of-vocabulary row, empty bag, `missing`, or where that is null zeros, and 1
    in the input `name__missing`, which a vector has, and a number whose `missing` is null.
    """

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")
    kind: FeatureKind
    vocabulary: str | None = None
    """Name of the file in `vocabularies/`, without `.parquet`; of id, history, audience and bag, and of a text
    without `hash_rows`."""
    max_length: int | None = Field(default=None, ge=1)
    """Longest history, bag or token list that is read; of longer ones the last entries count, of a text with a
    vocabulary the first."""
    separator: str | None = Field(default=None, min_length=1)
    """What stands between a bag's ids in a string of several."""
    hash_rows: int | None = Field(default=None, ge=2)
    """Rows of a text feature's table; row 0 stays out-of-vocabulary."""
    standardize: TextStandard | None = None
    """Of a text with a vocabulary: what is done to it before it is split at spaces, as by Keras' TextVectorization."""
    missing: float | None = 0.0
    """Value of a missing number: the training mean. Null where the tower is told that it is missing."""
    boundaries: list[float] | None = None
    """Of a number that is looked up by its range, rising: below the first is row 1, from the last on the last row, and
    row 0 is missing."""
    dims: int | None = Field(default=None, ge=1)
    """Numbers in a vector."""
    parts: list[DatePart] | None = Field(default=None, min_length=1)
    """What a date is read as, in this order; `bundle/dates.py` has the rows."""
    reference: datetime | None = None
    """The time that a date's `age` is counted from, UTC."""

    @property
    def inputs(self) -> dict[str, tuple[str, tuple[int | None, ...]]]:
        """The tower's inputs for it: dtype and shape by name, None for a length that the batch decides."""
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
        """What a request may give for it, in words."""
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
    """What the model was trained with [METHODS §2]: enough to read its numbers."""

    family: str
    sampler: str
    weight: str


class Interval(Record):
    """A figure with its 95 % bootstrap interval over queries; null bounds where none is defined (coverage, Gini)."""

    value: float
    low: float | None = None
    high: float | None = None


class CurvePoint(Record):
    """Offline metrics at one λ and μ.

    `metrics` names are `METRIC@K` over all queries, or `METRIC@K/BUCKET`.
    """

    bias_removal: float
    popularity: float = 0.0
    metrics: dict[str, Interval]


class Popularity(Record):
    """The prior's dial: the weight μ of log π that a request gets when it names none, and its limits."""

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


class BiasRemoval(Popularity):
    """The dial: the λ that a request gets when it names none, its limits, and how every λ scored offline."""

    default: float
    noise: str = "π"
    """Which noise ν λ multiplies the log of, in words [METHODS §9]: `π` is the label frequency, `p_n(y|x)` the tree.
    Beside a tree the name has its power in ν, 0 where training left none of it, and what ν has besides, for μ."""
    chosen_by: str = "the recipe, for want of validation data"
    """Split and metric that picked the default, e.g. `valid recall@20`."""
    curve_split: str = "none"
    """Split that the curve was measured on."""
    curve: list[CurvePoint] = []


class FileRecord(Record):
    """Size and checksum of one file."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Manifest(Record):
    """The whole of manifest.json; FORMAT.md is its prose."""

    schema_version: int
    name: str
    created_at: datetime
    labels: int = Field(ge=1)
    dim: int = Field(ge=1)
    similarity: Literal["dot", "cosine"]
    temperature: float = Field(gt=0)
    label_bias: bool
    kappa: float = Field(gt=0)
    kappa_bias: float | None = Field(default=None, gt=0)
    kappa_popularity: float | None = Field(default=None, gt=0)
    """Null where log p_n is log π: one coordinate holds both, and μ adds to λ; beside a tree, whose λ is not of that
    coordinate, for similar labels alone."""
    loss: Loss
    query_features: list[Feature]
    label_features: list[Feature] = []
    own_id: str | None = None
    """The label feature whose value is the label's id; null where there is none."""
    exclude_history: bool = False
    """Whether labels of a query's histories are left out of its answer, as they were in the evaluation."""
    display: list[str] = []
    """Columns of labels.arrow that are the user's own, shown in answers."""
    buckets: Buckets
    bias_removal: BiasRemoval
    popularity: Popularity = Popularity()
    training_data: dict[str, str | int]
    software: dict[str, str]
    files: dict[str, FileRecord] = {}

    @property
    def data_until(self) -> datetime:
        """When the training data was read, UTC (`training_data.read_at`): the model has nothing later. For bundles
        that do not say, when the bundle was made.
        """
        read_at = self.training_data.get("read_at")
        return utc(self.created_at if read_at is None else datetime.fromisoformat(str(read_at)))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.label_bias != (self.kappa_bias is not None):
            raise ValueError("kappa_bias belongs to a bundle with label_bias, and only to it")
        names = [feature.name for feature in self.query_features]
        if len(set(names)) != len(names):
            raise ValueError(f"query_features: expected distinct names, received {names}")
        return self


def dial_words(bias_removal: float, popularity: float) -> str:
    """`λ = 0.5`, and `λ = 0.5, μ = -1` where μ is not 0: a place on both dials, for people."""
    return f"λ = {bias_removal:g}" + (f", μ = {popularity:g}" if popularity else "")


def utc(at: datetime) -> datetime:
    """The same time with a zone; one without is UTC."""
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
