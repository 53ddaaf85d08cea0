"""The recipe: everything a training job depends on, typed once and checked before any work starts."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from trainer.errors import RecipeError
from trainer.losses import LOSSES
from trainer.optimizers import ROW_OPTIMIZERS
from trainer.samplers import SAMPLERS
from trainer.weights import WEIGHTS


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _one_of(what: str, table: dict[str, Any], name: str) -> None:
    if name not in table:
        raise ValueError(f"{what}: expected one of {', '.join(table)}, received {name!r}")


class Split(_Section):
    """How to cut interactions when `valid` or `test` files are not given."""

    strategy: Literal["random", "temporal", "leave_last_out"]
    """`random`: pairs by seed. `temporal`: the latest pairs of all. `leave_last_out`: per query, its last
    pair is test and the one before is valid; file order stands in for time where there is no timestamp."""
    valid: float = Field(default=0.1, ge=0, lt=1)
    """Share of all pairs; not used by `leave_last_out`."""
    test: float = Field(default=0.1, ge=0, lt=1)
    """Share of all pairs; not used when there is a test file (nor `valid`, when there is a valid file)."""

    @model_validator(mode="after")
    def _something_to_train_on(self) -> Self:
        if self.valid + self.test >= 1:
            raise ValueError(f"split: expected valid + test < 1, received {self.valid} + {self.test}")
        return self


class Data(_Section):
    """Where interactions and feature tables are. Paths are relative to the recipe."""

    train: Path
    valid: Path | None = None
    test: Path | None = None
    format: Literal["auto", "parquet", "csv", "tsv", "lists", "xmc"] = "auto"
    """`auto` goes by the file's ending. `lists`: one line per query, `query label label …`, oldest first.
    `xmc`: header `rows features labels`, then `label,label feature:value …`; every row is a query whose
    features become the bag column `features`."""
    query_id: str = "query_id"
    label_id: str = "label_id"
    timestamp: str | None = None
    """Number or timestamp column that orders a query's interactions."""
    weight: str | None = None
    """Column of finite weights ≥ 0 that scale each pair's loss."""
    queries: Path | None = None
    """Feature table of queries, keyed by `query_id`."""
    labels: Path | None = None
    """Feature table of labels, keyed by `label_id`; its labels are in the catalogue even if never seen."""
    display: list[str] = []
    """Columns of the label table that answers carry along, such as a title."""
    split: Split | None = None


class FeatureConfig(_Section):
    """One feature of a tower."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*$")
    """Its name in requests. A query feature named as `data.query_id` is the query's own id, a label feature
    named as `data.label_id` the label's own."""
    kind: Literal["id", "history", "bag", "text", "number"]
    """`id`: one id or category. `history`: ids of the labels the query interacted with before; never the
    positive itself. `bag`: ids, or ids with weights. `text`: words, hashed. `number`: standardised."""
    column: str | None = None
    """Column of the feature table; by default the feature's name."""
    separator: str | None = None
    """Splits a string column of a `bag`, such as `Action|Comedy`."""
    dim: int = Field(default=64, ge=1)
    """Width of its embedding; not used by `number`."""
    table: str | None = Field(default=None, pattern=r"^[A-Za-z][A-Za-z0-9_]*$")
    """Features of one table share a vocabulary and an embedding, across both towers; by default a table is
    named as its feature. A `history` shares the label id's with `table = "<label_id>"`."""
    max_length: int = Field(default=50, ge=1)
    """Longest history, bag or text read; of longer ones the last entries count."""
    min_count: int = Field(default=1, ge=1)
    """Ids in fewer training rows than this go to the out-of-vocabulary row; a label's own id never does."""
    hash_rows: int = Field(default=2**16, ge=2)
    """Rows of a `text` feature's table."""
    combiner: Literal["mean", "sum", "sqrtn"] = "mean"
    """How a history, bag or text is pooled."""
    unknown_rate: float = Field(default=0.01, ge=0, lt=1)
    """Share of a query feature's training values replaced by the out-of-vocabulary row, so that it learns
    what to say of an id never seen; 0 for label features."""

    @property
    def source(self) -> str:
        """The column it is read from."""
        return self.column or self.name

    @property
    def table_name(self) -> str:
        """Name of its vocabulary and embedding table."""
        return self.table or self.name


class Tower(_Section):
    """A tower: embeddings → combination → MLP → projection to `model.dim`."""

    features: list[FeatureConfig] = Field(min_length=1)
    combine: Literal["concat", "sum"] = "concat"
    """`sum` needs features of equal width."""
    hidden: list[int] = []
    """Widths of ReLU layers. With none, and an input already `model.dim` wide, there is no projection."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [feature.name for feature in self.features]
        if len(set(names)) != len(names):
            raise ValueError(f"features: expected distinct names, received {names}")
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"hidden: expected widths >= 1, received {self.hidden}")
        widths = {1 if feature.kind == "number" else feature.dim for feature in self.features}
        if self.combine == "sum" and len(widths) > 1:
            raise ValueError(f"combine = 'sum': expected features of equal width, received {sorted(widths)}")
        return self


class Model(_Section):
    """What the towers' outputs mean."""

    dim: int = Field(default=64, ge=1)
    similarity: Literal["cosine", "dot"] = "cosine"
    """`cosine` divides both outputs by their norm."""
    temperature: float = Field(default=0.1, gt=0)
    """T of logit = u·v / T."""
    learn_temperature: bool = False
    label_bias: bool = False
    """Adds a learned b_y to the logit, served as a coordinate of the index."""
    init_scale: float = Field(default=0.1, gt=0)
    """Standard deviation of fresh embeddings."""


class SamplerConfig(_Section):
    """Where negatives come from [METHODS §2.1]."""

    name: str = "in_batch"
    negatives: int | None = Field(default=None, ge=1)
    """Labels drawn per step (per row if not shared)."""
    alpha: float | None = Field(default=None, ge=0)
    """Exponent of `popularity`."""
    shared: bool | None = None
    """One set of draws for the whole batch (the default), or one per row."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What the sampler's function is called with, beside the catalogue."""
        return self.model_dump(exclude={"name"}, exclude_none=True)

    @model_validator(mode="after")
    def _defined(self) -> Self:
        _one_of("sampler", SAMPLERS, self.name)
        parameters = list(inspect.signature(SAMPLERS[self.name]).parameters.values())[1:]
        known = [parameter.name for parameter in parameters]
        for argument in self.arguments:
            if argument not in known:
                raise ValueError(f"sampler {self.name!r}: expected {known or 'no parameters'}, received {argument!r}")
        for parameter in parameters:
            if parameter.default is parameter.empty and parameter.name not in self.arguments:
                raise ValueError(f"sampler {self.name!r}: expected a value for {parameter.name!r}, received none")
        return self


class LossConfig(_Section):
    """Three independent choices: sampler × weight × family [METHODS §2]."""

    family: str = "softmax"
    weight: str = "unit"
    sampler: SamplerConfig = SamplerConfig()
    smoothing: float = Field(default=0.5, gt=0)
    """Pseudo-pairs added to every label's frequency, in the weights and in log p_n."""

    @model_validator(mode="after")
    def _defined(self) -> Self:
        _one_of("family", LOSSES, self.family)
        _one_of("weight", WEIGHTS, self.weight)
        return self


class Optimizer(_Section):
    """Row-wise sparse for embedding tables, Adam for everything dense."""

    embeddings: str = "adam"
    """`adam`: lazy Adam, moments of touched rows only. `adagrad`: one accumulator per row."""
    embedding_learning_rate: float = Field(default=0.01, gt=0)
    dense_learning_rate: float = Field(default=0.001, gt=0)
    schedule: Literal["constant", "linear"] = "constant"
    """`linear`: both rates fall to 0 at the last of `epochs`."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest norm of a step's whole gradient."""

    @model_validator(mode="after")
    def _defined(self) -> Self:
        _one_of("embeddings", ROW_OPTIMIZERS, self.embeddings)
        return self


class Training(_Section):
    """The loop."""

    epochs: int = Field(default=20, ge=1)
    batch_size: int = Field(default=2048, ge=2)
    patience: int | None = Field(default=None, ge=1)
    """Stops when the validation metric has not risen for this many evaluations. With a valid split, the epoch
    that did best on it is the one kept, whether training stopped early or not."""
    evaluate_every: int = Field(default=1, ge=1)
    """Epochs between validations; each takes the best of λ = 0, ½ and 1, the whole grid follows at the end."""
    refit: bool = False
    """After epochs and λ are chosen on valid, train again on train + valid for as many epochs."""
    precision: Literal["float32", "mixed_bfloat16"] = "float32"
    """`mixed_bfloat16` computes MLPs and logits in bfloat16 while training; tables, losses and the finished
    model stay float32."""
    checkpoint_steps: int = Field(default=1000, ge=1)
    """Steps between checkpoints; one more is written after every epoch."""


BiasRemovalValue = Annotated[float, Field(ge=-1, le=2)]
"""λ within the limits that a bundle lets requests choose from."""


class Evaluation(_Section):
    """What is measured, over the full catalogue."""

    ks: list[int] = Field(default=[10, 20, 50, 100], min_length=1)
    metric: str = "recall@20"
    """Chosen on valid: early stopping and the default λ go by it."""
    bias_removal: list[BiasRemovalValue] = Field(
        default=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0], min_length=1
    )
    """The grid of λ."""
    default_bias_removal: BiasRemovalValue = 0.5
    """λ served by default when there is no valid split to choose it on."""
    exclude_seen: bool = True
    """Leave a query's training labels out of its ranking."""
    buckets: Literal["quantile", "count"] = "quantile"
    """Head/torso/tail at the 66 % and 33 % quantile of label counts, or at 100 and 20 pairs."""
    bootstrap: int = Field(default=200, ge=10)
    """Resamples behind each interval."""
    max_valid_queries: int = Field(default=10_000, ge=1)
    """Validation during training uses at most this many queries, drawn by seed."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(k < 1 for k in self.ks):
            raise ValueError(f"ks: expected values >= 1, received {self.ks}")
        name, _, k = self.metric.partition("@")
        if name not in ("recall", "ndcg", "precision", "hit_rate", "mrr") or k not in map(str, self.ks):
            raise ValueError(
                f"metric: expected recall|ndcg|precision|hit_rate|mrr @ one of {self.ks}, received {self.metric!r}"
            )
        return self


class Recipe(_Section):
    """A training job."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(default=0, ge=0, lt=2**31)
    data: Data
    query: Tower
    label: Tower
    model: Model = Model()
    loss: LossConfig = LossConfig()
    optimizer: Optimizer = Optimizer()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(feature.kind == "history" for feature in self.label.features):
            raise ValueError("label.features: expected kinds other than history, which belongs to queries")
        numbers = [{f.name for f in tower.features if f.kind == "number"} for tower in (self.query, self.label)]
        if both := sorted(numbers[0] & numbers[1]):
            raise ValueError(f"number features: expected names of one tower each, received {', '.join(both)} in both")
        tables: dict[str, FeatureConfig] = {}
        for feature in (*self.query.features, *self.label.features):
            if feature.kind == "number":
                continue
            other = tables.setdefault(feature.table_name, feature)
            if other.dim != feature.dim or (other.kind == "text") != (feature.kind == "text"):
                raise ValueError(
                    f"table {feature.table_name!r}: expected features of one width and of ids or of text alike, "
                    f"received {other.name!r} ({other.kind}, {other.dim}) "
                    f"and {feature.name!r} ({feature.kind}, {feature.dim})"
                )
        return self

    @property
    def string_columns(self) -> list[str]:
        """Columns of feature tables that are text, also where a text format makes them look like numbers."""
        features = (*self.query.features, *self.label.features)
        return [feature.source for feature in features if feature.kind not in ("number", "history")]


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a TOML recipe and apply `a.b=value` overrides; data paths become relative to the recipe.

    Raises:
        RecipeError: unreadable, an unknown key or an impossible value; names the key and what was expected.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: expected a recipe: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: expected TOML: {error}") from error
    for override in overrides:
        _apply_override(tree, override)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        problems = "; ".join(_problem(problem) for problem in error.errors())
        raise RecipeError(f"{path}: {problems}") from error
    paths = {
        key: path.parent / value
        for key in ("train", "valid", "test", "queries", "labels")
        if (value := getattr(recipe.data, key)) is not None
    }
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=paths)})


def _problem(problem: ErrorDetails) -> str:
    """One validation error in words: where, what was expected, what was received."""
    where = ".".join(map(str, problem["loc"])) or "recipe"
    if problem["type"] == "value_error":
        return f"{where}: {problem['msg'].removeprefix('Value error, ')}"
    if problem["type"] == "extra_forbidden":
        return f"{where}: expected one of {', '.join(_keys_beside(problem['loc']))}, received an unknown key"
    return f"{where}: {problem['msg']}, received {problem['input']!r}"


def _keys_beside(location: tuple[str | int, ...]) -> list[str]:
    """The keys of the section that holds this one."""
    section: type[BaseModel] = Recipe
    for name in location[:-1]:
        if isinstance(name, str):
            kind = section.model_fields[name].annotation
            candidates = [kind, *get_args(kind)]
            section = next(part for part in candidates if isinstance(part, type) and issubclass(part, BaseModel))
    return list(section.model_fields)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key; the value is read as TOML, or as a string if it is none."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set: expected KEY=VALUE, received {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.split(".")
    node: Any = tree
    for part in parents:
        node = (
            node[_index(node, part, key)] if isinstance(node, list) else _section(node, part, key).setdefault(part, {})
        )
    if isinstance(node, list):
        node[_index(node, last, key)] = value
    else:
        _section(node, last, key)[last] = value


def _section(node: Any, part: str, key: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise RecipeError(f"--set {key}: expected a section before {part!r}, found {node!r}")
    return node


def _index(node: list[Any], part: str, key: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise RecipeError(f"--set {key}: expected an index below {len(node)}, received {part!r}")
    return int(part)
