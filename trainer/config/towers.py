"""Features, towers and what their outputs mean: `[query]`, `[label]`, `[model]`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from longtail.trainer.config.sections import Section


class FeatureConfig(Section):
    """One feature of a tower: where its values are read, and how they are embedded."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*$")
    """Its name in requests. A query feature named as `data.query_id` is the query's own id, a label feature
    named as `data.label_id` the label's own."""
    kind: Literal["id", "history", "bag", "text", "number"]
    """`id`: one id or category. `history`: ids of the labels the query interacted with before; never the
    positive itself. `bag`: ids, or ids with weights. `text`: words, hashed. `number`: standardised."""
    column: str | None = None
    """Column of the feature table, or of the interactions; by default the feature's name."""
    origin: Literal["table", "row"] = Field(default="table", alias="from")
    """`from` in a recipe: where its column is. `table`: the feature table. `row`: the interactions, of a query feature:
    its context, such as the device, the hour or the words searched for, which may differ from row to row."""
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
    unknown_rate: float | None = Field(default=None, ge=0, lt=1)
    """Share of training values replaced by the out-of-vocabulary row, so that it is trained to stand for ids never
    seen. By default 0.01 in the query tower and 0 in the label tower; give the label's own id some if labels are to
    be added while serving."""

    @property
    def source(self) -> str:
        """The column it is read from."""
        return self.column or self.name

    @property
    def table_name(self) -> str:
        """Name of its vocabulary and embedding table."""
        return self.table or self.name


class TowerConfig(Section):
    """A tower: embeddings → combination → MLP → projection to `model.dim`."""

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


class ModelConfig(Section):
    """The scoring function `u·v / T` of the towers' outputs, with an optional label bias."""

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
