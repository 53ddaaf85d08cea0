"""Features, towers and what their outputs mean: `[query]`, `[label]`, `[model]`."""

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

from longtail.bundle import DATE_ROWS, DatePart
from longtail.trainer import register
from longtail.trainer.config.base import Choice, Section
from longtail.trainer.errors import RecipeError
from longtail.trainer.layers import FEATURES, POOLED, FeatureKind, Kind


class EncoderConfig(Section):
    """Layers over a history's entries in their order, each of which sees those before it; a bare string is a name.

    What they make of the last entry stands for the history; of an empty one, a learned vector.
    """

    name: Literal["sasrec", "hstu"]
    """`sasrec`: blocks of causal self-attention and a feed-forward layer (Kang and McAuley 2018), normalised before
    each. `hstu`: pointwise attention with a bias by distance, gated (Zhai et al. 2024)."""
    layers: int = Field(default=2, ge=1, le=32)
    heads: int = Field(default=2, ge=1)
    """Attention heads; `dim` of the feature is divided among them."""
    hidden: int | None = Field(default=None, ge=1)
    """Width of the feed-forward layers of `sasrec`; 4·`dim` unless given."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """Share of the coordinates of entries, and of what each layer adds to them, set to 0 in training."""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def _problems(self) -> Iterator[str]:
        if self.hidden is not None and self.name != "sasrec":
            yield f"encoder: expected hidden with 'sasrec' only, received {self.name!r}"


class TowerChoice(Choice):
    """A tower of one's own: a row of `TOWERS`, by its name, and its parameters."""

    registry: ClassVar[str] = "tower"


class KindChoice(Choice):
    """A feature kind of one's own: a row of `FEATURES`, by its name, and its parameters."""

    registry: ClassVar[str] = "feature"

    @property
    def row(self) -> FeatureKind:
        """Return the kind."""
        return FEATURES[self.name]


OWN_ID_UNKNOWN_RATE = 0.1
"""Default `unknown_rate` of a label's own id with other features."""


class FeatureConfig(Section):
    """One feature of a tower: where its values are read, and how they are embedded."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*$")
    """Its name in requests. A query feature named as `data.query_id` is the query's own id, a label feature
    named as `data.label_id` the label's own."""
    kind: Kind
    """`id`: one id or category. `history`: ids of the labels the query interacted with before; never the
    positive itself. `audience`: ids of the queries that chose the label; never the row's own. `bag`: ids, or ids with
    weights. `text`: words, hashed. `number`: one, as `transform` says.
    `vector`: `dims` numbers, such as a pretrained embedding of a text or an image. `date`: a time, as its `parts`.
    A recipe may name a kind of one's own; `kind` is then what it reads, and `own` the choice."""
    column: str | None = None
    """Column of the feature table, or of the interactions; by default the feature's name."""
    origin: Literal["table", "row"] = Field(default="table", alias="from")
    """`from` in a recipe: where its column is. `table`: the feature table. `row`: the interactions, of a query feature:
    its context, such as the device, the hour or the words searched for, which may differ from row to row."""
    separator: str | None = None
    """Splits a string column of a `bag`, such as `Action|Comedy`."""
    dim: int = Field(default=64, ge=1)
    """Width of its embedding; not used by `vector`, nor by a `number` but with `transform = "quantile"`."""
    table: str | None = Field(default=None, pattern=r"^[A-Za-z][A-Za-z0-9_]*$")
    """Features of one table share a vocabulary and an embedding, across both towers; by default a table is
    named as its feature. A `history` shares the label id's with `table = "<label_id>"`, an `audience` the query id's
    with `table = "<query_id>"`."""
    max_length: int = Field(default=50, ge=1)
    """Longest history, bag or text read; of longer ones the last entries count. Of an `audience`: how many of a longer
    one a training step draws, anew each; exported labels read all of it, as do labels that are added."""
    min_count: int = Field(default=1, ge=1)
    """Ids in fewer training rows than this read the out-of-vocabulary row. Of the own ids, and of a history or an
    audience, these are training pairs; the own id's number holds for those that share its table."""
    hash_rows: int = Field(default=2**16, ge=2)
    """Rows of a `text` feature's table."""
    combiner: Literal["mean", "sum", "sqrtn", "attention"] = "mean"
    """How a history, audience, bag or text is pooled. `attention` is the mean by weights times exp(e·a), e an entry's
    embedding and a a learned vector."""
    weights: Literal["equal", "symmetric"] = "equal"
    """Of a `history` or an `audience`: what an entry weighs. `equal`: 1. `symmetric`: 1 / √(n·d), n the entries and d
    the training pairs of the entry's label, or query (LightGCN, He et al. 2020)."""
    damping: float = Field(default=0.0, ge=0)
    """Entries of zeros that a `mean` is taken with, Σwe / (Σ|w| + damping): few entries say less than many. Where
    `similarity` is a cosine and nothing else is in the tower, it changes nothing."""
    unknown_rate: float | None = Field(default=None, ge=0, lt=1)
    """Share of training values replaced by the out-of-vocabulary row, so that it is trained to stand for ids never
    seen. By default 0.01 in the query tower; in the label tower 0, and 0.1 of the label's own id beside other
    features. A `vector`, or a `number` that tells missing values apart, becomes missing instead; another `number`
    never does."""
    events: list[str] = Field(default_factory=list)
    """Of a `history`: only pairs of these types, of those that `data.events` gives a weight above 0; by default all."""
    sample: int | None = Field(default=None, ge=1)
    """Of a `history`: how many entries of a longer one training draws, anew each time; each weighs as many as it stands
    for. By default all, up to `max_length`, as evaluation and the service read."""
    entries: Literal["table", "label_tower", "both"] = "table"
    """Of a `history`. `table`: an entry is its label's row of `table`. `label_tower`: what the label tower makes of its
    label, by all its features, with its gradient: `dim` is `model.dim`, and labels without a training pair are told
    apart, too. `both`: the sum of the two."""
    half_life: float | None = Field(default=None, gt=0)
    """Of a `history`: an entry weighs half as much as the one that comes so many entries after it."""
    encoder: EncoderConfig | None = None
    """Of a `history`: reads it as a sequence, by the layers of `sasrec` or `hstu`, in place of pooling it; the data
    need an order in time. A step then holds the pairs of whole queries."""
    transform: Literal["standard", "log", "quantile"] = "standard"
    """Of a `number`. `standard`: minus the training mean, over the training standard deviation. `log`: the same of
    sign(x)·log(1 + |x|), for prices and counts. `quantile`: an embedding for each of `buckets` ranges that hold as many
    training values each."""
    buckets: int = Field(default=16, ge=2, le=1024)
    """Ranges of `transform = "quantile"`; fewer where many values are equal."""
    missing: Literal["mean", "flag"] = "mean"
    """Of a `number` that is not given, null or NaN: the training mean, or that and a flag beside it that the tower
    reads. With `transform = "quantile"` it has an embedding of its own."""
    dims: int | None = Field(default=None, ge=1)
    """Numbers in a `vector`; needed there."""
    projection: int | None = Field(default=None, ge=1)
    """Width of a linear layer after a `vector`; without it the numbers go into the tower as they are."""
    normalise: bool = False
    """Divides a `vector` by its norm, before its projection; one of zeros stays."""
    parts: list[DatePart] = Field(default=["hour", "weekday", "month", "age"], min_length=1)
    """What a `date` is read as, in UTC; the mean of their embeddings stands for it. `age` is in days before the latest
    one in training, by powers of two."""

    _own: KindChoice | None = PrivateAttr(default=None)

    @property
    def own(self) -> KindChoice | None:
        """Return the kind of one's own that the recipe names; None for one of ours."""
        return self._own

    @property
    def source(self) -> str:
        """Return the column it is read from."""
        return self.column or self.name

    @property
    def table_name(self) -> str:
        """Return name of its vocabulary and of what its ids are rows of: an embedding table, or label embeddings."""
        if self.entries == "table":
            return self.table or self.name
        return LABEL_ROWS if self.entry_table is None else f"{LABEL_ROWS}-{self.entry_table}"

    @property
    def reads_label_tower(self) -> bool:
        """Return whether its entries are made of outputs of the label tower, which no embedding table holds."""
        return self.entries != "table"

    @property
    def entry_table(self) -> str | None:
        """Return the embedding table whose rows are added to the label embeddings that are its entries; None if none
        is."""
        return (self.table or self.name) if self.entries == "both" else None

    @property
    def has_table(self) -> bool:
        """Return whether it is looked up in an embedding table."""
        return self.kind not in ("number", "vector") or self.in_buckets

    @property
    def bagged(self) -> bool:
        """Return whether a tower sees entries with weights."""
        return self.kind in POOLED

    @property
    def in_buckets(self) -> bool:
        """Return whether it is a number that is looked up by its range."""
        return self.kind == "number" and self.transform == "quantile"

    @property
    def table_rows(self) -> int | None:
        """Return rows of its table where the data do not decide; None for a table with a vocabulary."""
        if self.kind == "text":
            return self.hash_rows
        if self.kind == "date":
            return DATE_ROWS
        return self.buckets + 1 if self.in_buckets else None

    @property
    def has_flag(self) -> bool:
        """Return whether an input `NAME__missing` tells the tower that it is missing."""
        return self.kind == "vector" or (self.kind == "number" and self.missing == "flag" and not self.in_buckets)

    @property
    def unknown(self) -> tuple[str, int] | None:
        """Get the tower's input that says that a value is unknown, and what it holds then; None if nothing says so."""
        if self.has_flag:
            return f"{self.name}__missing", 1
        return (self.name, 0) if self.has_table else None

    @property
    def in_tree(self) -> bool:
        """Return whether the tree of sampler `adversarial` reads it: not vectors, dates, ranges, numbers with a flag,
        nor histories with an encoder."""
        return self.kind not in ("vector", "date") and not (self.in_buckets or self.has_flag or self.encoder)

    @property
    def width(self) -> int:
        """Return columns that it adds to a concatenation, if its kind is ours."""
        if self.kind == "vector":
            return self.projection or self.dims or 1
        return self.dim if self.has_table else 1 + self.has_flag

    @model_validator(mode="wrap")
    @classmethod
    def _of_any_kind(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Read a kind of one's own off the recipe, and refuse keys of the steps that it takes the place of."""
        name = given.get("kind") if isinstance(given, dict) else None
        if not isinstance(name, str) or name in get_args(Kind):
            return handler(given)
        function = register.find("feature", name)
        keys = {field.alias or key for key, field in cls.model_fields.items()}
        parameters = inspect.signature(function).parameters.values()
        if taken := sorted(keys & {it.name for it in parameters if it.kind is it.KEYWORD_ONLY}):
            raise ValueError(f"feature {name!r}: expected parameters that are no keys of a feature, received {taken}")
        own = KindChoice(name=name, **{key: value for key, value in given.items() if key not in keys})
        feature = handler({key: given[key] for key in keys & given.keys()} | {"kind": own.row.reads})
        if left := sorted(_LAST_STEPS & feature._changed):
            raise ValueError(
                f"feature {feature.name!r}: expected no {', '.join(left)} with kind {own.name!r}, which does "
                f"that itself with what it reads ({own.row.reads})"
            )
        feature._own = own
        return feature

    @model_serializer(mode="wrap")
    def _as_in_the_recipe(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        made: dict[str, Any] = handler(self)
        if self._own is not None:
            made |= {"kind": self._own.name, **self._own.model_dump(mode=info.mode, exclude={"name"})}
        return made

    @property
    def _changed(self) -> set[str]:
        return set(self.model_dump(exclude_defaults=True, by_alias=False)) - {"name", "kind"}

    def _problems(self) -> Iterator[str]:
        feature, changed = f"feature {self.name!r}", self._changed
        for holds, keys, why in (
            *((self.kind not in kinds, keys, f"only for {' and '.join(kinds)}") for kinds, keys in _ONLY_OF.items()),
            (not self.in_buckets, {"buckets"}, "needs transform = 'quantile'"),
            (not (self.bagged and self.combiner == "mean"), {"damping"}, "needs a mean of entries"),
            (self.sample is not None, {"half_life"}, "sample leaves gaps between entries"),
            (self.entries == "label_tower", {"table", "min_count"}, "entries = 'label_tower' are in no table"),
            (self.encoder is not None, _POOLING, "an encoder reads entries in their order"),
        ):
            if holds and (given := sorted(keys & changed)):
                yield f"{feature} of kind {self.kind!r}: expected no {', '.join(given)}: {why}"
        if (self.kind == "audience" or self.sample is not None) and self.combiner == "sqrtn":
            yield f"{feature}: expected another combiner than 'sqrtn' where training draws some of the entries"
        if self.kind == "vector" and self.dims is None:
            yield f"{feature}: expected dims, the numbers in a vector, received none"
        if self.encoder is not None and self.dim % self.encoder.heads:
            yield f"{feature}: expected a dim that encoder.heads = {self.encoder.heads} divides, received {self.dim}"
        if len(set(self.parts)) < len(self.parts):
            yield f"{feature}: expected distinct parts, received {self.parts}"


LABEL_ROWS = "label-rows"
"""Prefix of vocabularies of all labels, whose rows are label embeddings; no name of a feature's table has a hyphen."""

NEIGHBOURS = ("history", "audience")
"""Kinds whose entries are the training pairs of the query, or of the label."""

_ONLY_OF = {
    NEIGHBOURS: {"weights"},
    ("history",): {"encoder", "entries", "events", "half_life", "sample"},
    ("number",): {"transform", "buckets", "missing"},
    ("vector",): {"dims", "projection", "normalise"},
    ("date",): {"parts"},
}
"""Keys that belong to some kinds alone."""

_POOLING = {"combiner", "damping", "half_life", "sample", "weights"}
"""Keys of pooling, which an encoder takes the place of."""

_LAST_STEPS = {"combiner", "damping", "encoder", "transform", "buckets", "projection"}
"""Keys of the steps that a kind of one's own takes the place of."""


class TowerConfig(Section):
    """A tower: embeddings → combination → MLP → projection to `model.dim`.

    A `tower` of one's own takes the place of all between the combination and the projection.
    """

    features: list[FeatureConfig] = Field(min_length=1)
    combine: Literal["concat", "sum"] = "concat"
    """`sum` needs features of equal width."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the combination's coordinates set to 0 in training, the others scaled by 1 / (1 − share); none
    in evaluation and in the service."""
    input_activation: Literal["linear", "relu"] = "linear"
    """Applied to the combination, before `hidden`. [Re19 §5]'s 512 → ReLU → 512 is one bag of `dim = 512` with
    `combiner = "sum"`, `input_activation = "relu"` and `model.dim = 512`."""
    hidden: list[int] = Field(default_factory=list)
    """Widths of ReLU layers. With none, a linear input and one already `model.dim` wide, there is no projection."""
    tower: TowerChoice | None = None
    """A tower of one's own, by its name, or with its parameters: `{ name = "gated", experts = 4 }`. It goes from the
    combination to any width, in place of `hidden`."""

    def _problems(self) -> Iterator[str]:
        names = [feature.name for feature in self.features]
        if len(set(names)) != len(names):
            yield f"features: expected distinct names, received {names}"
        if self.tower is not None and self.hidden:
            yield f"tower {self.tower.name!r}: expected no hidden with it, which belongs to our tower"
        if any(width < 1 for width in self.hidden):
            yield f"hidden: expected widths >= 1, received {self.hidden}"
        widths = {feature.width for feature in self.features if feature.own is None}
        if self.combine == "sum" and len(widths) > 1:
            yield f"combine = 'sum': expected features of equal width, received {sorted(widths)}"


class ModelConfig(Section):
    """The scoring function `u·v / T` of the towers' outputs, with an optional label bias."""

    dim: int = Field(default=64, ge=1)
    similarity: Literal["cosine", "dot"] = "cosine"
    """`cosine` divides both outputs by their norm."""
    temperature: Annotated[float, Field(gt=0)] | Literal["auto"] = 0.1
    """T of logit = u·v / T. `auto`: `fit` takes the best on valid of several short runs, a fifth of the epochs each; a
    warm start keeps that of its bundle."""
    learn_temperature: bool = False
    label_bias: bool = False
    """Adds a learned b_y to the logit, served as a coordinate of the index."""
    init_scale: float = Field(default=0.1, gt=0)
    """Standard deviation of fresh embeddings."""

    @property
    def number(self) -> float:
        """Return the temperature as a number; raises RecipeError before `fit` has chosen it."""
        if self.temperature == "auto":
            raise RecipeError("model.temperature: expected a number, received 'auto', which `fit` alone chooses")
        return self.temperature

    def _problems(self) -> Iterator[str]:
        if self.learn_temperature and self.temperature == "auto":
            yield "learn_temperature: expected a temperature to begin from, received 'auto'"
