"""The recipe: everything a training job depends on, typed once and checked before any work starts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from longtail.trainer import register
from longtail.trainer.config.base import Section
from longtail.trainer.config.loss import LossConfig
from longtail.trainer.config.rows import ObjectiveConfig, check_objectives, shares_of, weighted_events
from longtail.trainer.config.sections import DataConfig, EvaluationConfig, OptimizerConfig, TrainingConfig
from longtail.trainer.config.towers import NEIGHBOURS, OWN_ID_UNKNOWN_RATE, FeatureConfig, ModelConfig, TowerConfig
from longtail.trainer.config.tune import TuneConfig, check_tune
from longtail.trainer.losses.families import LOSSES


class Recipe(Section):
    """A training job: its data, towers, loss, optimizer, loop and evaluation.

    Fields are the tables of a recipe file, keyword-only, checked as they are set (pydantic's ValidationError says
    what was expected). `load_recipe` reads one from TOML.

    Example:
        >>> recipe = Recipe.model_validate({
        ...     "name": "shop",
        ...     "data": {"train": "orders.parquet", "query_id": "user_id", "label_id": "item_id"},
        ...     "query": {"features": [{"name": "user_id", "kind": "id"}]},
        ...     "label": {"features": [{"name": "item_id", "kind": "id"}]},
        ...     "loss": {"sampler": {"name": "uniform", "negatives": 100}, "weight": "importance"},
        ... })
        >>> str(recipe.loss), recipe.training.epochs
        ('softmax · uniform(negatives = 100) · importance', 20)
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(default=0, ge=0, lt=2**31)
    data: DataConfig
    query: TowerConfig
    label: TowerConfig
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    objectives: dict[str, ObjectiveConfig] = Field(default_factory=dict)
    """Kinds of events over shared towers, by name; without, all pairs are of one kind [METHODS §2.4]."""
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tune: TuneConfig | None = None
    """What `longtail-train tune` tries; no other command reads it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(feature.kind == "history" for feature in self.label.features):
            raise ValueError("label.features: expected kinds other than history, which belongs to queries")
        if any(feature.kind == "audience" for feature in self.query.features):
            raise ValueError("query.features: expected kinds other than audience, which belongs to labels")
        self._check_rows()
        self._check_label_vectors()
        self._check_events()
        self._check_sequences()
        if self.objectives:
            check_objectives(self.objectives, self.data.events)
        self._check_cosine()
        self._check_dial_of_tree()
        self._check_likelihood()
        if self.tune is not None:
            check_tune(self.tune, self.evaluation)
        if self.training.accumulate > 1 and self.loss.resolved_hits == "mask_known":
            raise ValueError(
                "training.accumulate: expected 1 with loss.hits 'mask_known', whose positives are of the whole batch, "
                f"received {self.training.accumulate}"
            )
        if self.loss.negatives_per == "query" and self.data.reduction == "sample":
            raise ValueError(
                "loss.negatives_per: expected 'pair' with data.reduction = 'sample', which visits one pair of every "
                "query as it is, received 'query'"
            )
        numbers = [
            {f.name for f in tower.features if f.kind == "number" and not f.has_table}
            for tower in (self.query, self.label)
        ]
        if both := sorted(numbers[0] & numbers[1]):
            raise ValueError(f"number features: expected names of one tower each, received {', '.join(both)} in both")
        self._check_label_rows()
        self._check_neighbours()
        tables: dict[str, FeatureConfig] = {}
        for feature in (*self.query.features, *self.label.features):
            name = feature.entry_table if feature.reads_label_tower else feature.table_name
            if not feature.has_table or name is None:
                continue
            other = tables.setdefault(name, feature)
            mixed = feature.kind != other.kind and (feature.table_rows or other.table_rows) is not None
            if other.dim != feature.dim or mixed:
                raise ValueError(
                    f"table {name!r}: expected features of one width and of ids or of text alike, "
                    f"received {other.name!r} ({other.kind}, {other.dim}) "
                    f"and {feature.name!r} ({feature.kind}, {feature.dim})"
                )
            if feature.kind == "text" and other.hash_rows != feature.hash_rows:
                raise ValueError(
                    f"table {name!r}: expected texts of one hash_rows, "
                    f"received {other.name!r} ({other.hash_rows}) and {feature.name!r} ({feature.hash_rows})"
                )
            of_labels = {each.kind == "history" or each.name == self.data.label_id for each in (other, feature)}
            if of_labels == {True, False} and "audience" in (other.kind, feature.kind):
                raise ValueError(
                    f"table {name!r}: expected ids of queries or of labels, received both: {other.name!r} "
                    f"({other.kind}) and {feature.name!r} ({feature.kind})"
                )
            if other.table_rows != feature.table_rows:
                raise ValueError(
                    f"table {name!r}: expected numbers of as many buckets, "
                    f"received {other.name!r} ({other.buckets}) and {feature.name!r} ({feature.buckets})"
                )
        return self

    def _check_label_rows(self) -> None:
        """Refuse histories of label embeddings that are not as wide as these."""
        for feature in self.query.features:
            if feature.reads_label_tower and feature.dim != self.model.dim:
                raise ValueError(
                    f"query feature {feature.name!r}: expected dim = {self.model.dim}, as of model.dim, with entries = "
                    f"{feature.entries!r}, received {feature.dim}"
                )

    def _check_neighbours(self) -> None:
        """Refuse neighbours of queries that are another in every row, as a neighbour is no row."""
        if self.loss.neighbours is None or "query" not in self.loss.neighbours.sides:
            return
        of_rows = [each.name for each in self.query.features if each.origin == "row" or each.encoder is not None]
        if of_rows or self.data.valid_from:
            beside = f"query feature {of_rows[0]!r}" if of_rows else f"data.valid_from = {self.data.valid_from!r}"
            raise ValueError(
                "loss.neighbours: expected sides = ['label'] with features of from = 'row', encoders or versions, as a "
                f"neighbour is no row that these could be read of, received 'query' beside {beside}"
            )

    def _check_rows(self) -> None:
        """Refuse features, attributes and impressions that the interactions cannot give."""
        data = self.data
        for feature in self.label.features:
            if feature.origin == "row":
                raise ValueError(f"label feature {feature.name!r}: expected from = 'table', received 'row'")
        for feature in self.query.features:
            if feature.origin == "row" and (feature.kind == "history" or feature.name == data.query_id):
                raise ValueError(
                    f"query feature {feature.name!r}: expected from = 'row' of neither a history nor the query's own "
                    f"id, received {feature.kind!r}"
                )
        if data.format in ("lists", "xmc") and (self.context_columns or data.impressions or data.valid_from):
            raise ValueError(
                "data.format: expected a format of columns with features of from = 'row', impressions or valid_from, "
                f"received {data.format!r}"
            )
        if self.loss.impressions and not data.impressions:
            raise ValueError(
                f"loss.impressions: expected data.impressions, their column, beside {self.loss.impressions}, "
                "received none"
            )
        if self.training.replay < 1 and (data.timestamp is None or data.reduction == "sample"):
            raise ValueError(
                "training.replay: expected data.timestamp, and a data.reduction that visits pairs, below 1, received "
                f"{self.training.replay:g} with timestamp {data.timestamp} and reduction {data.reduction!r}"
            )
        if data.valid_from and not (data.queries and data.timestamp):
            raise ValueError(
                "data.valid_from: expected data.queries and data.timestamp with it, "
                f"received {data.queries} and {data.timestamp}"
            )

    def _check_label_vectors(self) -> None:
        """Refuse vectors by label id that are of no such vector of the labels."""
        for feature in self.label.features:
            if feature.of_label is not None:
                raise ValueError(
                    f"label feature {feature.name!r}: expected of_label of query features only, "
                    f"received {feature.of_label!r}"
                )
        vectors = {feature.name: feature for feature in self.label.features if feature.kind == "vector"}
        for feature in self.query.features:
            if feature.of_label is None:
                continue
            if feature.of_label not in vectors:
                raise ValueError(
                    f"query feature {feature.name!r}: expected of_label to name a vector among the label features, "
                    f"{', '.join(vectors) or 'of which there is none'}, received {feature.of_label!r}"
                )
            of_label = vectors[feature.of_label]
            for key in ("dims", "normalise"):
                expected, received = getattr(of_label, key), getattr(feature, key)
                if expected != received:
                    raise ValueError(
                        f"query feature {feature.name!r}: expected {key} = {str(expected).lower()}, as of the label "
                        f"feature {of_label.name!r}, received {str(received).lower()}"
                    )

    def _check_events(self) -> None:
        """Refuse histories of event types that the data do not tell apart."""
        types = [name for name, weight in self.data.events.weights.items() if weight] if self.data.events else []
        for feature in self.query.features:
            if unknown := [name for name in feature.events if name not in types]:
                raise ValueError(
                    f"feature {feature.name!r}: expected events among {types or 'none'}, the types that "
                    f"data.events.weights gives a weight above 0, received {unknown}"
                )

    def _check_sequences(self) -> None:
        """Refuse sequences without an order, and batches of them that take a query's positives for its negatives."""
        sequences = [feature.name for feature in self.query.features if feature.encoder is not None]
        if sequences and not self.data.ordered:
            raise ValueError(
                f"query feature {sequences[0]!r}: expected data.timestamp, or data.split.strategy = 'leave_last_out' "
                "or 'temporal_per_query', with an encoder, which reads a history in its order, received neither"
            )
        timed = [feature.name for feature in self.query.features if feature.reads_times]
        if timed and self.data.timestamp is None:
            raise ValueError(
                f"query feature {timed[0]!r}: expected data.timestamp with encoder.time_buckets, which tell apart how "
                "long ago entries were, received none"
            )
        if (
            sequences
            and self.loss.sampler.of_the_batch
            and self.training.accumulate == 1
            and self.loss.resolved_hits == "mask"
        ):
            raise ValueError(
                f"loss.hits: expected 'mask_known', or 'keep', with sampler {self.loss.sampler.name!r} and a sequence, "
                f"{sequences[0]!r}: a batch then holds all pairs of a query, which would be negatives of each other, "
                "received 'mask'"
            )

    def _check_cosine(self) -> None:
        """Refuse what is defined on cosines for a model whose logits are none."""
        model = self.model
        if self.loss.sampler.features is not None and model.similarity != "cosine":
            raise ValueError(
                "loss.sampler.features: expected model.similarity = 'cosine' with random features, which are of unit "
                f"vectors, received {model.similarity!r}"
            )
        plain = model.similarity == "cosine" and model.temperature == 1 and not model.learn_temperature
        if LOSSES[self.loss.family.name].cosine and (not plain or model.label_bias):
            raise ValueError(
                f"loss.family: expected similarity = 'cosine', temperature = 1, fixed, and no label bias with "
                f"{self.loss.family.name!r}, which is a loss of cosines, received {model.similarity!r}, "
                f"{model.temperature}, learn_temperature = {model.learn_temperature}, label_bias = {model.label_bias}"
            )
        bounded = model.similarity == "cosine" and not (model.learn_temperature or model.label_bias)
        if self.loss.family.name == "bilateral_softmax" and self.loss.family.power not in (None, 1) and not bounded:
            raise ValueError(
                "loss.family: expected similarity = 'cosine', a fixed temperature and no label bias with power "
                f"{self.loss.family.power:g}, under which a constant added to all logits changes the loss, received "
                f"{model.similarity!r}, learn_temperature = {model.learn_temperature}, "
                f"label_bias = {model.label_bias}"
            )

    def _check_dial_of_tree(self) -> None:
        """Refuse λ < 0 for a tree: it favours labels that p_n(y|x) all but rules out, and no search finds those."""
        if self.loss.sampler.name != "adversarial":
            return
        default = self.evaluation.default_bias_removal
        asked = {
            "bias_removal": min(self.evaluation.bias_removal),
            "default_bias_removal": 0.0 if default is None else default,
        }
        for key, least in asked.items():
            if least < 0:
                raise ValueError(
                    f"evaluation.{key}: expected λ >= 0 with sampler 'adversarial', for which the service looks for "
                    f"the labels that the model or the tree likes best, received {least:g}"
                )

    def _check_likelihood(self) -> None:
        """Refuse a likelihood of scores that are no log-probabilities at any λ of the grid."""
        if not self.evaluation.log_likelihood:
            return
        if self.objectives:
            raise ValueError(
                "evaluation.log_likelihood: expected false with objectives, whose served score is a sum of "
                f"log-probabilities and none itself, received true beside {', '.join(self.objectives)}"
            )
        if reason := self.loss.uncalibrated():
            raise ValueError(
                "evaluation.log_likelihood: expected false, or a loss whose scores are log-probabilities at some λ: "
                f"{reason}; received {self.loss}"
            )
        if self.loss.calibrated_at not in self.evaluation.bias_removal:
            raise ValueError(
                f"evaluation.bias_removal: expected {self.loss.calibrated_at} in it, where scores are "
                f"log-probabilities and their likelihood is measured, received {self.evaluation.bias_removal}"
            )

    @property
    def export_shares(self) -> dict[str, float]:
        """Return share of every objective in the served score, by name; empty without objectives."""
        return shares_of(self.objectives) if self.objectives else {}

    @property
    def served_similarity(self) -> Literal["cosine", "dot"]:
        """Of what is served: a sum of several objectives' cosines is the inner product with a vector of another length
        than 1."""
        several = sum(share > 0 for share in self.export_shares.values()) > 1
        return "dot" if several else self.model.similarity

    @property
    def weighted_data(self) -> DataConfig:
        """`data`, its types of events weighing what their objectives say."""
        if not self.objectives or self.data.events is None:
            return self.data
        return self.data.model_copy(update={"events": weighted_events(self.objectives, self.data.events)})

    @property
    def objective_of_type(self) -> list[int] | None:
        """Return the objective's place for each type of `data.events.weights`, −1 for none; None without objectives."""
        if not self.objectives or self.data.events is None:
            return None
        places = {event: at for at, each in enumerate(self.objectives.values()) for event in each.events}
        return [places.get(event, -1) for event in self.data.events.weights]

    @property
    def context_columns(self) -> list[str]:
        """Return columns of the interactions that query features are read from."""
        return list(dict.fromkeys(feature.source for feature in self.query.features if feature.origin == "row"))

    @property
    def own_id(self) -> FeatureConfig | None:
        """Return the label feature that is the label's own id; None without one."""
        return next((feature for feature in self.label.features if feature.name == self.data.label_id), None)

    @property
    def describes_labels(self) -> bool:
        """Return whether labels have features beside their own id, by which one without training pairs is known."""
        return any(feature.name != self.data.label_id for feature in self.label.features)

    def label_unknown_rate(self, feature: FeatureConfig) -> float:
        """Get share of a label feature's ids that become unknown in training: what the recipe says, or its default."""
        if feature.unknown_rate is not None:
            return feature.unknown_rate
        return OWN_ID_UNKNOWN_RATE if feature is self.own_id and self.describes_labels else 0.0

    @property
    def table_columns(self) -> dict[str, list[str]]:
        """Return columns that the job reads of each feature table, `query` and `label`, beside the ids."""
        columns = {"query": [self.data.valid_from] if self.data.valid_from else [], "label": list(self.data.display)}
        for side, tower, own in (("query", self.query, self.data.query_id), ("label", self.label, self.data.label_id)):
            columns[side] += [
                each.source
                for each in tower.features
                if each.kind not in NEIGHBOURS and each.name != own and each.origin == "table"
            ]
        return {side: list(dict.fromkeys(names)) for side, names in columns.items()}

    @property
    def resolved_patience(self) -> int | None:
        """Evaluations without a rise after which training stops; None never does."""
        given = self.training.patience
        if given is None:
            return 5 if self.optimizer.schedule == "constant" else None
        return given or None

    @property
    def own_rows(self) -> dict[str, str]:
        """Return where the rows come from that are not Longtail's own, by kind and name (`weight damped`)."""
        loss = self.loss
        named = [("sampler", loss.sampler.name), ("weight", loss.weight.name), ("family", loss.family.name)]
        metrics = [("metric", metric.name) for metric in self.evaluation.metrics]
        return register.own_rows([*named, *self.own_layers, *metrics])

    @property
    def own_layers(self) -> list[tuple[str, str]]:
        """Kind and name of every row that both towers' layers come from and that is not Longtail's own."""
        sides = (self.query, self.label)
        kinds = [feature.own for side in sides for feature in side.features]
        towers = [("tower", side.tower.name) for side in sides if side.tower is not None]
        return [*towers, *(("feature", kind.name) for kind in kinds if kind is not None)]

    @property
    def string_columns(self) -> list[str]:
        """Return columns of features that are text, also where a text format makes them look like numbers."""
        features = (*self.query.features, *self.label.features)
        return [
            feature.source
            for feature in features
            if feature.kind not in ("number", "vector", *NEIGHBOURS) or feature.of_label is not None
        ]
