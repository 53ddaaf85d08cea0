"""The recipe tables `[query]`, `[label]` and `[model]`: features, towers and the scoring function."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from longtail.bundle import DatePart
from longtail.bundle.dates import DATE_ROWS
from longtail.trainer import register
from longtail.trainer.config.base import RowChoice, Section
from longtail.trainer.errors import RecipeError
from longtail.trainer.layers import FEATURES, POOLED, FeatureKind, Kind


class EncoderConfig(Section):
    """Encode a history as a sequence with causal layers; a bare string is a name.

    The output at the last entry represents the history. A learned vector represents an empty history.
    """

    name: Literal["sasrec", "hstu"]
    """`sasrec`: blocks of causal self-attention and a feed-forward layer, with layer normalisation before each (Kang
    and McAuley 2018). `hstu`: gated pointwise attention with a bias by distance (Zhai et al. 2024)."""
    layers: int = Field(default=2, ge=1, le=32)
    heads: int = Field(default=2, ge=1)
    """Number of attention heads, among which `dim` of the feature is divided."""
    smoothing: list[Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=list)
    """Factors γ of moving averages that each block of `sasrec` adds to its attention: the mean of all entries so far,
    weighed by γ^age, for every γ, with learned weights for each dimension. 1 is the plain mean. `[0.5, 0.8, 1.0]` helps
    where histories are short and attention overfits; a causal form of the filter of BSARec (Shin et al. 2024)."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """Dropout rate, in training, of the entries' embeddings and of the output of each layer before it is added."""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def _problems(self) -> Iterator[str]:
        if self.smoothing and self.name != "sasrec":
            yield f"encoder: expected smoothing with 'sasrec' only, received {self.name!r}"


class TowerChoice(RowChoice):
    """Choose a custom tower: a row of `TOWERS`, by its name, and its parameters."""

    registry: ClassVar[str] = "tower"


class KindChoice(RowChoice):
    """Choose a custom feature kind: a row of `FEATURES`, by its name, and its parameters."""

    registry: ClassVar[str] = "feature"

    @property
    def row(self) -> FeatureKind:
        """Return the registered feature kind."""
        return FEATURES[self.name]


OWN_ID_UNKNOWN_RATE = 0.1
"""Default `unknown_rate` of the label id in a tower that has other features too."""


class FeatureConfig(Section):
    """Describe one feature of a tower: the source of its values, and how to embed them."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*$")
    """Name of the feature in requests. A query feature with the name of `data.query_id` is the query's own id; a label
    feature with the name of `data.label_id` is the label's own id."""
    kind: Kind
    """`id`: one id or category. `history`: ids of the labels that the query interacted with before, without the row's
    positive. `audience`: ids of the queries that chose the label, without the row's query. `bag`: ids, with or without
    weights. `text`: hashed words. `number`: one number, scaled as `transform` says.
    `vector`: `dims` numbers, such as a pretrained embedding of a text or an image. `date`: a time, split into hour,
    weekday, month and age.
    A recipe may name a custom kind; `kind` then holds the kind of its input, and `custom_kind` the custom kind."""
    column: str | None = None
    """Column of the feature table, or of the interactions; by default the feature's name."""
    origin: Literal["table", "row"] = Field(default="table", alias="from")
    """Written `from` in a recipe. `table` reads the column from the feature table. `row` reads it from the
    interactions, for query features only: the context of a query, such as the device, the hour or the search words,
    which may differ from row to row."""
    separator: str | None = None
    """For a `bag` in a string column, such as `Action|Comedy`: the character that separates the entries."""
    dim: int = Field(default=64, ge=1)
    """Width of the embedding. A `vector` ignores it, as does a `number` without `transform = "quantile"`."""
    table: str | None = Field(default=None, pattern=r"^[A-Za-z][A-Za-z0-9_]*$")
    """Name of the embedding table; by default the feature's name. Features with the same table share a vocabulary and
    embeddings, even across towers. A `history` shares the table of the label id with `table = "<label_id>"`, an
    `audience` that of the query id with `table = "<query_id>"`."""
    max_length: int = Field(default=50, ge=1)
    """Largest number of entries read from a history, bag or text: the last ones. A training step draws this many
    entries of a longer `audience` at random; exported labels, and labels added to a service, read the whole
    audience."""
    min_count: int = Field(default=1, ge=1)
    """Ids in fewer training rows read the out-of-vocabulary row. For the own ids, histories and audiences, the rows
    counted are training pairs. Features that share the table of an own id use the `min_count` of the own id."""
    hash_rows: int = Field(default=2**16, ge=2)
    """Rows of a `text` feature's table."""
    combiner: Literal["mean", "sum", "sqrtn", "attention"] = "mean"
    """How a history, audience, bag or text is pooled. `attention` is the mean by weights times exp(e·a), where e is an
    entry's embedding and a is a learned vector."""
    weights: Literal["equal", "symmetric"] = "equal"
    """Weights of the entries of a `history` or an `audience`. `equal`: 1. `symmetric`: 1 / √(n·d), where n is the
    number of entries and d the number of training pairs of the entry's label or query (LightGCN, He et al. 2020)."""
    damping: float = Field(default=0.0, ge=0)
    """Shrinks a `mean` of few entries towards 0: Σwe / (Σ|w| + damping). It has no effect if `similarity` is `cosine`
    and the tower has no other feature."""
    unknown_rate: float | None = Field(default=None, ge=0, lt=1)
    """Share of training values replaced by the out-of-vocabulary row, which trains this row to represent unseen ids.
    The default is 0.01 in the query tower; 0.1 for the label's own id in a label tower with other features; else 0. A
    `vector`, or a `number` with a representation of missing values, becomes missing instead. Any other `number` ignores
    the rate."""
    events: list[str] = Field(default_factory=list)
    """For a `history`: reads only pairs of these event types, each of which needs a weight above 0 in `data.events`. By
    default all."""
    sample: int | None = Field(default=None, ge=1)
    """For a `history`: each training step draws this many entries of a longer history, and weighs each by the number of
    entries that it represents. By default training reads all entries up to `max_length`, as evaluation and the service
    do."""
    entries: Literal["table", "label_tower", "both"] = "table"
    """For a `history`, the embedding of an entry. `table`: the label's row of `table`. `label_tower`: the output of the
    label tower for the label, from all label features, with gradient. `dim` must then equal `model.dim`, and labels
    without a training pair can be distinguished as well. `both`: the sum of the two."""
    half_life: float | None = Field(default=None, gt=0)
    """For a `history`: the number of entries over which the weight of older entries falls by half."""
    encoder: EncoderConfig | None = None
    """For a `history`: encodes it as a sequence, with `sasrec` or `hstu` layers, instead of pooling it. The data need
    an order in time. A training step then holds all pairs of each of its queries."""
    transform: Literal["standard", "log", "quantile"] = "standard"
    """For a `number`. `standard` subtracts the training mean and divides by the training standard deviation. `log` does
    the same to sign(x)·log(1 + |x|), for prices and counts. `quantile` learns an embedding for each of `buckets` ranges
    with equal numbers of training values."""
    buckets: int = Field(default=16, ge=2, le=1024)
    """Number of ranges of `transform = "quantile"`; there are fewer if many values are equal."""
    missing: Literal["mean", "flag"] = "mean"
    """For a `number` that is absent, null or NaN. `mean` reads the training mean; `flag` also adds an input that marks
    the value as missing. With `transform = "quantile"` missing values have an embedding of their own."""
    dims: int | None = Field(default=None, ge=1)
    """Length of a `vector`, which needs this key."""
    projection: int | None = Field(default=None, ge=1)
    """Width of a linear layer after a `vector`. Without it the tower reads the vector as it is."""
    normalise: bool = False
    """Divides a `vector` by its norm before the projection. A vector of zeros stays zero."""
    parts: ClassVar[list[DatePart]] = ["hour", "weekday", "month", "age"]
    """Parts of a `date`, in UTC; the mean of the parts' embeddings represents the date. `age` counts days before the
    latest date in training, in ranges by powers of two."""

    _custom_kind: KindChoice | None = PrivateAttr(default=None)

    @property
    def custom_kind(self) -> KindChoice | None:
        """Return the custom kind that the recipe names; None for a built-in kind."""
        return self._custom_kind

    @property
    def source(self) -> str:
        """Return the column with the feature's values."""
        return self.column or self.name

    @property
    def table_name(self) -> str:
        """Name the feature's vocabulary and the table that its ids index: embeddings, or label embeddings."""
        if self.entries == "table":
            return self.table or self.name
        return LABEL_ROWS if self.entry_table is None else f"{LABEL_ROWS}-{self.entry_table}"

    @property
    def entry_table(self) -> str | None:
        """Return the embedding table added to outputs of the label tower; None without one."""
        return (self.table or self.name) if self.entries == "both" else None

    @property
    def has_table(self) -> bool:
        """Return whether the feature's values are looked up in an embedding table."""
        return self.kind not in ("number", "vector") or self.in_buckets

    @property
    def in_buckets(self) -> bool:
        """Return whether the feature is a number looked up by range."""
        return self.kind == "number" and self.transform == "quantile"

    @property
    def table_rows(self) -> int | None:
        """Return the fixed number of rows of the feature's table; None for a table with a vocabulary."""
        if self.kind == "text":
            return self.hash_rows
        if self.kind == "date":
            return DATE_ROWS
        return self.buckets + 1 if self.in_buckets else None

    @property
    def has_flag(self) -> bool:
        """Return whether an input `NAME__missing` marks missing values for the tower."""
        return self.kind == "vector" or (self.kind == "number" and self.missing == "flag" and not self.in_buckets)

    @property
    def unknown(self) -> tuple[str, int] | None:
        """Return the tower input that marks an unknown value, and its mark; None without such an input."""
        if self.has_flag:
            return f"{self.name}__missing", 1
        return (self.name, 0) if self.has_table else None

    @property
    def in_tree(self) -> bool:
        """Return whether the tree of sampler `adversarial` reads the feature.

        It does not read vectors, dates, ranges, numbers with a flag, nor histories with an encoder.
        """
        return self.kind not in ("vector", "date") and not (self.in_buckets or self.has_flag or self.encoder)

    @property
    def width(self) -> int:
        """Return the columns that a built-in kind adds to a concatenation."""
        if self.kind == "vector":
            return self.projection or self.dims or 1
        return self.dim if self.has_table else 1 + self.has_flag

    @model_validator(mode="wrap")
    @classmethod
    def _read_custom_kind(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Read a custom kind; refuse keys of the steps that it replaces."""
        name = values.get("kind") if isinstance(values, dict) else None
        if not isinstance(name, str) or name in get_args(Kind):
            return handler(values)
        function = register.find("feature", name)
        keys = {field.alias or key for key, field in cls.model_fields.items()}
        parameters = inspect.signature(function).parameters.values()
        if reserved := sorted(keys & {it.name for it in parameters if it.kind is it.KEYWORD_ONLY}):
            raise ValueError(
                f"feature {name!r}: expected parameters that are no keys of a feature, received {reserved}"
            )
        custom_kind = KindChoice(name=name, **{key: value for key, value in values.items() if key not in keys})
        # Validated as the built-in kind that it reads, so that its keys get that kind's checks.
        feature = handler({key: values[key] for key in keys & values.keys()} | {"kind": custom_kind.row.reads})
        if replaced_steps := sorted(_LAST_STEPS & feature._changed):
            raise ValueError(
                f"feature {feature.name!r}: expected no {', '.join(replaced_steps)} with kind {custom_kind.name!r}, "
                f"which replaces these steps of kind {custom_kind.row.reads!r}"
            )
        feature._custom_kind = custom_kind
        return feature

    @model_serializer(mode="wrap")
    def _as_in_the_recipe(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        dumped: dict[str, Any] = handler(self)
        if self._custom_kind is not None:
            dumped |= {"kind": self._custom_kind.name, **self._custom_kind.model_dump(mode=info.mode, exclude={"name"})}
        return dumped

    @property
    def _changed(self) -> set[str]:
        return set(self.model_dump(exclude_defaults=True, by_alias=False)) - {"name", "kind"}

    def _problems(self) -> Iterator[str]:
        feature, changed = f"feature {self.name!r}", self._changed
        for holds, keys, why in (
            *((self.kind not in kinds, keys, f"only for {' and '.join(kinds)}") for kinds, keys in _ONLY_OF.items()),
            (not self.in_buckets, {"buckets"}, "needs transform = 'quantile'"),
            (not (self.kind in POOLED and self.combiner == "mean"), {"damping"}, "needs a mean of entries"),
            (self.sample is not None, {"half_life"}, "sample leaves gaps between entries"),
            (self.entries == "label_tower", {"table", "min_count"}, "entries = 'label_tower' are in no table"),
            (self.encoder is not None, _POOLING, "an encoder reads entries in their order"),
        ):
            if holds and (refused := sorted(keys & changed)):
                yield f"{feature} of kind {self.kind!r}: expected no {', '.join(refused)}: {why}"
        if (self.kind == "audience" or self.sample is not None) and self.combiner == "sqrtn":
            yield f"{feature}: expected another combiner than 'sqrtn' where training draws some of the entries"
        if self.kind == "vector" and self.dims is None:
            yield f"{feature}: expected dims, the numbers in a vector, received none"
        if self.encoder is not None and self.dim % self.encoder.heads:
            yield f"{feature}: expected a dim that encoder.heads = {self.encoder.heads} divides, received {self.dim}"


LABEL_ROWS = "label-rows"
"""Prefix of vocabularies whose rows are label embeddings; its hyphen is in no name of a feature's table."""

NEIGHBOURS = ("history", "audience")
"""Kinds whose entries are the training pairs of the query, or of the label."""

_ONLY_OF = {
    NEIGHBOURS: {"weights"},
    ("history",): {"encoder", "entries", "events", "half_life", "sample"},
    ("number",): {"transform", "buckets", "missing"},
    ("vector",): {"dims", "projection", "normalise"},
}
"""Keys that belong to some kinds alone."""

_POOLING = {"combiner", "damping", "half_life", "sample", "weights"}
"""Keys of pooling, which an encoder replaces."""

_LAST_STEPS = {"combiner", "damping", "encoder", "transform", "buckets", "projection"}
"""Keys of the steps that a custom kind replaces."""


class TowerConfig(Section):
    """Build a tower: embeddings → combination → MLP → projection to `model.dim`.

    A custom `tower` replaces the layers between the combination and the projection.
    """

    features: list[FeatureConfig] = Field(min_length=1)
    combine: Literal["concat", "sum"] = "concat"
    """How features are combined: concatenated or summed. `sum` needs features of equal width."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the combination in training: this share of coordinates is set to 0, and the others are scaled by
    1 / (1 − share)."""
    input_activation: Literal["linear", "relu"] = "linear"
    """Applied to the combination, before `hidden`. [Re19 §5]'s 512 → ReLU → 512 is one bag of `dim = 512` with
    `combiner = "sum"`, `input_activation = "relu"` and `model.dim = 512`."""
    hidden: list[int] = Field(default_factory=list)
    """Widths of ReLU layers. Without hidden layers, a linear combination of width `model.dim` is not projected."""
    tower: TowerChoice | None = None
    """A custom tower, by its name, or with its parameters: `{ name = "gated", experts = 4 }`. It maps the combination
    to any width, instead of `hidden`."""

    def _problems(self) -> Iterator[str]:
        names = [feature.name for feature in self.features]
        if len(set(names)) != len(names):
            yield f"features: expected distinct names, received {names}"
        if self.tower is not None and self.hidden:
            yield f"tower {self.tower.name!r}: expected no hidden with it, as a custom tower replaces hidden layers"
        if any(width < 1 for width in self.hidden):
            yield f"hidden: expected widths >= 1, received {self.hidden}"
        widths = {feature.width for feature in self.features if feature.custom_kind is None}
        if self.combine == "sum" and len(widths) > 1:
            yield f"combine = 'sum': expected features of equal width, received {sorted(widths)}"


class ModelConfig(Section):
    """Define the score `u·v / T` of the towers' outputs, with an optional label bias."""

    dim: int = Field(default=64, ge=1)
    similarity: Literal["cosine", "dot"] = "cosine"
    """`cosine` divides both outputs by their norm."""
    temperature: Annotated[float, Field(gt=0)] | Literal["auto"] = 0.1
    """T of logit = u·v / T. With `auto`, `fit` tries several temperatures in short runs of a fifth of the epochs each
    and takes the best on valid, each at its best epoch. A warm start keeps the temperature of its bundle."""
    learn_temperature: bool = False
    label_bias: bool = False
    """Adds a learned bias b_y to the logit. The index stores it as one more coordinate."""
    init_scale: float = Field(default=0.1, gt=0)
    """Standard deviation of initial embeddings."""

    @property
    def number(self) -> float:
        """Return the temperature as a number; raises RecipeError before `fit` has chosen it."""
        if self.temperature == "auto":
            raise RecipeError("model.temperature: expected a number, received 'auto', which `fit` alone chooses")
        return self.temperature

    def _problems(self) -> Iterator[str]:
        if self.learn_temperature and self.temperature == "auto":
            yield "learn_temperature: expected a temperature to begin from, received 'auto'"
