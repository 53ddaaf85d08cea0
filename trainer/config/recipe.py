"""The recipe: everything a training job depends on, typed once and checked before any work starts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from longtail.trainer.config.base import Section, one_of
from longtail.trainer.config.data import Data
from longtail.trainer.config.loss import LossConfig
from longtail.trainer.config.towers import FeatureConfig, Model, Tower
from longtail.trainer.losses.families import LOSSES
from longtail.trainer.model.optimizers import ROW_OPTIMIZERS


class Optimizer(Section):
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
        one_of("embeddings", ROW_OPTIMIZERS, self.embeddings)
        return self


class Training(Section):
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


class Propensity(Section):
    """Chance that a relevant label was labelled at all, by its frequency [Jain et al. 2016].

    1 / p_y = 1 + C (N_y + b)^−a, with C = (ln N − 1)(b + 1)^a, of N training queries N_y with label y.
    """

    a: float = Field(default=0.55, ge=0)
    """0.6 for Amazon, 0.5 for Wikipedia data."""
    b: float = Field(default=1.5, gt=0)
    """2.6 for Amazon, 0.4 for Wikipedia data."""


class Evaluation(Section):
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
    log_likelihood: bool = False
    """Also measure the predictive log-likelihood, log softmax(s_λ) of each held-out pair, in nats."""
    bootstrap: int = Field(default=200, ge=10)
    """Resamples behind each interval."""
    max_valid_queries: int = Field(default=10_000, ge=1)
    """Validation during training uses at most this many queries, drawn by seed."""
    propensity: Propensity | None = None
    """Adds `psp@k` and `psndcg@k`, precision and nDCG that count a label by its inverse propensity."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(k < 1 for k in self.ks):
            raise ValueError(f"ks: expected values >= 1, received {self.ks}")
        name, _, k = self.metric.partition("@")
        names = ("recall", "ndcg", "precision", "hit_rate", "mrr", "psp", "psndcg")
        if name not in names or k not in map(str, self.ks):
            raise ValueError(f"metric: expected {'|'.join(names)} @ one of {self.ks}, received {self.metric!r}")
        if name in ("psp", "psndcg") and self.propensity is None:
            raise ValueError(f"metric: expected evaluation.propensity beside {self.metric!r}, received none")
        return self


class Recipe(Section):
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
        self._check_cosine()
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
            if feature.kind == "text" and other.hash_rows != feature.hash_rows:
                raise ValueError(
                    f"table {feature.table_name!r}: expected texts of one hash_rows, "
                    f"received {other.name!r} ({other.hash_rows}) and {feature.name!r} ({feature.hash_rows})"
                )
        return self

    def _check_cosine(self) -> None:
        """Refuse what is defined on cosines for a model whose logits are none."""
        model = self.model
        if self.loss.sampler.name == "model" and model.similarity != "cosine":
            raise ValueError(
                "loss.sampler: expected model.similarity = 'cosine' with sampler 'model', whose random features are of "
                f"unit vectors, received {model.similarity!r}"
            )
        plain = model.similarity == "cosine" and model.temperature == 1 and not model.learn_temperature
        if LOSSES[self.loss.family.name].cosine and (not plain or model.label_bias):
            raise ValueError(
                f"loss.family: expected similarity = 'cosine', temperature = 1, fixed, and no label bias with "
                f"{self.loss.family.name!r}, which is a loss of cosines, received {model.similarity!r}, "
                f"{model.temperature}, learn_temperature = {model.learn_temperature}, label_bias = {model.label_bias}"
            )

    @property
    def string_columns(self) -> list[str]:
        """Columns of feature tables that are text, also where a text format makes them look like numbers."""
        features = (*self.query.features, *self.label.features)
        return [feature.source for feature in features if feature.kind not in ("number", "history")]
