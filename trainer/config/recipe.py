"""The recipe: all settings of a training job, typed once and checked before any work starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from longtail.bundle.manifest import LogColumns
from longtail.tables.times import UNITS
from longtail.trainer import register
from longtail.trainer.config.base import Section
from longtail.trainer.config.loss import LossConfig
from longtail.trainer.config.rows import ObjectiveConfig
from longtail.trainer.config.sections import (
    CooccurrenceConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    PriorConfig,
    TrainingConfig,
)
from longtail.trainer.config.towers import NEIGHBOURS, OWN_ID_UNKNOWN_RATE, FeatureConfig, ModelConfig, TowerConfig
from longtail.trainer.config.tune import TuneConfig
from longtail.trainer.losses.families import LOSSES


class Recipe(Section):
    """Describe a training job: data, towers, loss, optimizer, loop and evaluation.

    Fields are the tables of a recipe file. They are keyword-only and checked when set; pydantic's ValidationError says
    what was expected. `load_recipe` reads a recipe from TOML.

    Example:
        >>> recipe = Recipe.model_validate(
        ...     {
        ...         "name": "shop",
        ...         "data": {"train": "clicks.parquet", "query_id": "user_id", "label_id": "product_id"},
        ...         "query": {"features": [{"name": "user_id", "kind": "id"}]},
        ...         "label": {"features": [{"name": "product_id", "kind": "id"}]},
        ...         "loss": {"sampler": {"name": "uniform", "negatives": 100}, "weight": "importance"},
        ...     }
        ... )
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
    """Objectives by name, each with its own event types, over shared towers. Without objectives, all pairs train
    one objective [METHODS §2.4]."""
    prior: PriorConfig = PriorConfig()
    cooccurrence: CooccurrenceConfig | None = None
    """The term of co-occurrence; without this table the score has none."""
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tune: TuneConfig | None = None
    """Ranges for `longtail-train tune`. No other command reads them."""

    def _problems(self) -> Iterator[str]:
        for feature in self.query.features:
            yield from self._problems_of_query_feature(feature, f"query feature {feature.name!r}")
        for feature in self.label.features:
            subject = f"label feature {feature.name!r}"
            if feature.kind == "history":
                yield f"{subject}: expected kinds other than history, which belongs to queries"
            if feature.origin == "row":
                yield f"{subject}: expected from = 'table', received 'row'"
        yield from self._problems_of_tables()
        yield from self._problems_of_neighbours()
        yield from self._problems_of_data()
        if self.objectives:
            yield from self._problems_of_objectives(self.objectives)
        yield from self._problems_of_prior()
        if self.cooccurrence is not None and self.evaluation.log_likelihood:
            yield "cooccurrence: expected no table with evaluation.log_likelihood, which is that of the towers alone"
        yield from self._problems_of_batches()
        yield from self._problems_of_scores()
        if self.tune is not None:
            yield from self.tune.problems(self.evaluation)

    def _problems_of_query_feature(self, feature: FeatureConfig, subject: str) -> Iterator[str]:
        if feature.kind == "audience":
            yield f"{subject}: expected kinds other than audience, which belongs to labels"
        if feature.origin == "row" and (feature.kind == "history" or feature.name == self.data.query_id):
            yield f"{subject}: expected from = 'row' of neither a history nor the query's own id"
        if feature.entries != "table" and feature.dim != self.model.dim:
            yield f"{subject}: expected dim = model.dim = {self.model.dim} with entries = {feature.entries!r}"
        weights = self.data.events.weights if self.data.events else {}
        types = [name for name, weight in weights.items() if weight]
        if unknown := [name for name in feature.events if name not in types]:
            yield f"{subject}: expected events of data.events.weights, {types or 'none'}, received {unknown}"
        if feature.encoder is not None and not self.data.ordered:
            yield f"{subject}: expected data.timestamp, or a data.split by time per query, with an encoder"

    def _problems_of_tables(self) -> Iterator[str]:
        """Yield features that name the same table but cannot share it."""
        # Means and deviations of numbers are kept by the feature's name, without its tower.
        of_query, of_label = (
            {feature.name for feature in tower.features if feature.kind == "number" and not feature.has_table}
            for tower in (self.query, self.label)
        )
        if shared := sorted(of_query & of_label):
            yield f"number features: expected names of one tower each, received {', '.join(shared)} in both"
        first_uses: dict[str, FeatureConfig] = {}
        for feature in (*self.query.features, *self.label.features):
            name = feature.entry_table if feature.entries != "table" else feature.table_name
            if not feature.has_table or name is None:
                continue
            earlier = first_uses.setdefault(name, feature)
            pair = (earlier, feature)
            received = " and ".join(f"{it.name!r} ({it.kind}, {it.dim}, {it.table_rows or 'own'} rows)" for it in pair)
            fixed = [it.kind if it.table_rows else None for it in pair]
            if earlier.dim != feature.dim or fixed[0] != fixed[1] or earlier.table_rows != feature.table_rows:
                yield f"table {name!r}: expected one dim, and either ids or one kind and size, received {received}"
            of_labels = {it.kind == "history" or it.name == self.data.label_id for it in pair}
            if len(of_labels) == 2 and "audience" in (earlier.kind, feature.kind):
                yield f"table {name!r}: expected ids of queries or of labels, received both: {received}"

    def _problems_of_neighbours(self) -> Iterator[str]:
        """Yield histories and audiences whose `table` holds other ids."""
        every = (*self.query.features, *self.label.features)
        for kind, id_name in (("history", self.data.label_id), ("audience", self.data.query_id)):
            tables = [feature.entry_table or feature.table_name for feature in every if feature.kind == kind]
            id_tables = {id_name, *(feature.table_name for feature in every if feature.name == id_name)}
            others = {
                feature.table_name for feature in every if feature.kind in ("id", "bag") and feature.name != id_name
            }
            for feature in every:
                if feature.kind != kind or feature.table is None or feature.table in {feature.name, *id_tables}:
                    continue
                alone = kind == "history" and feature.entries == "table" and tables.count(feature.table) == 1
                if alone or feature.table in others - id_tables:
                    yield (
                        f"feature {feature.name!r}: table = {feature.table!r} is not allowed because it holds other "
                        f"ids than a {kind}; use table = {id_name!r}, the table of another {kind}, or none"
                    )

    def _problems_of_data(self) -> Iterator[str]:
        data, loss = self.data, self.loss
        if loss.impressions and not data.impressions:
            yield f"loss.impressions: {loss.impressions} needs the column of impressions; set data.impressions"
        lacking = [name for name in self.evaluation.groups if name not in self.context_columns]
        if lacking and not data.queries:
            yield f"evaluation.groups: expected data.queries, a table with {lacking[0]!r}, received none"
        random = data.split is not None and data.split.strategy.startswith("random")
        if self.evaluation.history == "growing" and (random or not data.ordered):
            yield (
                "evaluation.history: expected pairs in time order with 'growing', by data.timestamp or a data.split by "
                f"time per query, received {'a random data.split' if random else 'none'}"
            )
        if data.valid_from and not (data.queries and data.timestamp):
            yield "data.valid_from: expected data.queries and data.timestamp with it"
        if loss.negatives_per == "query" and data.reduction == "sample":
            yield "loss.negatives_per: expected 'pair' with data.reduction = 'sample', which visits one pair of a query"

    def _problems_of_objectives(self, objectives: dict[str, ObjectiveConfig]) -> Iterator[str]:
        names, events = list(objectives), self.data.events
        if len(names) == 1:
            yield f"objectives: expected at least two, or no [objectives] at all, received {names}"
        if wrong := [name for name in names if not name.isidentifier()]:
            yield f"objectives: expected names of letters, digits and _, received {wrong}"
        types = sorted(event for event, weight in (events.weights if events else {}).items() if weight)
        objective_events = sorted(event for it in objectives.values() for event in it.events)
        if objective_events != types:
            yield f"objectives: expected each type of data.events.weights once, {types}, received {objective_events}"
        if not any(self.export_shares.values()):
            yield "objectives: expected some export > 0, received only zeros"

    def _problems_of_prior(self) -> Iterator[str]:
        prior, kinds = self.prior, {feature.name: feature.kind for feature in self.label.features}
        if prior.kind == "count":
            return
        if self.data.timestamp is None:
            yield f"prior.kind: expected data.timestamp with {prior.kind!r}, received none"
        if self.loss.sampler.name == "adversarial":
            yield f"prior.kind: expected 'count' with sampler 'adversarial', received {prior.kind!r}"
        if self.evaluation.target_prior is not None:
            yield f"prior.kind: expected 'count' with evaluation.target_prior, received {prior.kind!r}"
        if wrong := [name for name in prior.features if kinds.get(name) not in ("id", "number")]:
            yield f"prior.features: expected label features of the kinds id and number, received {wrong}"

    def _problems_of_batches(self) -> Iterator[str]:
        loss, parts = self.loss, self.training.accumulate
        if parts > 1 and loss.resolved_hits == "mask_known":
            yield f"training.accumulate: expected 1 with loss.hits 'mask_known' (over whole batches), received {parts}"
        sequences = [feature.name for feature in self.query.features if feature.encoder is not None]
        if self.training.periods > 1 and (sequences or self.data.timestamp is None):
            lack = f"the sequence {sequences[0]!r}: a batch holds all pairs of a query" if sequences else "no times"
            yield f"training.periods: expected 1 with {lack}, received {self.training.periods}"
        if sequences and loss.sampler.of_the_batch and parts == 1 and loss.resolved_hits == "mask":
            yield (
                f"loss.hits: expected 'mask_known' or 'keep' with sampler {loss.sampler.name!r} and the sequence "
                f"{sequences[0]!r}: a batch holds all pairs of a query, which would be negatives of each other"
            )
        if loss.neighbours is not None and "query" in loss.neighbours.sides:
            changing = [
                feature.name
                for feature in self.query.features
                if feature.origin == "row" or feature.encoder is not None
            ]
            if changing or self.data.valid_from:
                yield (
                    "loss.neighbours: sides includes 'query', but a neighbour has no row from which to read "
                    f"{changing[0] if changing else 'data.valid_from'}; use sides = ['label']"
                )

    def _problems_of_scores(self) -> Iterator[str]:
        model, loss, evaluation = self.model, self.loss, self.evaluation
        cosine = model.similarity == "cosine"
        bounded = cosine and not (model.learn_temperature or model.label_bias)
        if loss.sampler.argument("features") is not None and not cosine:
            yield "loss.sampler.features: expected model.similarity = 'cosine' with random features, received 'dot'"
        if LOSSES[loss.family.name].cosine and not (bounded and model.temperature == 1):
            yield (
                f"loss.family: expected similarity = 'cosine', temperature = 1, fixed, and no label bias with "
                f"{loss.family.name!r}, received {model}"
            )
        if loss.family.name == "bilateral_softmax" and loss.family.argument("power") != 1 and not bounded:
            yield (
                "loss.family: expected similarity = 'cosine', a fixed temperature and no label bias with power "
                f"{loss.family.argument('power'):g}, received {model}"
            )
        # The search of a tree cannot find labels with almost no probability p_n(y|x).
        if loss.sampler.name == "adversarial" and (least := min(evaluation.bias_removal)) < 0:
            yield f"evaluation.bias_removal: expected λ >= 0 with sampler 'adversarial', received {least:g}"
        if not evaluation.log_likelihood:
            return
        if self.objectives:
            yield "evaluation.log_likelihood: expected false with objectives, whose served score is a weighted sum"
        if reason := loss.explain_uncalibrated():
            yield f"evaluation.log_likelihood: expected false, as scores are log-probabilities at no λ: {reason}"
        if loss.calibrated_at not in evaluation.bias_removal:
            yield (
                f"evaluation.bias_removal: expected {loss.calibrated_at} in it, where scores are "
                f"log-probabilities and their likelihood is measured, received {evaluation.bias_removal}"
            )

    @property
    def export_shares(self) -> dict[str, float]:
        """Return the share of every objective in the served score, by name; empty without objectives."""
        shares = {name: it.weight if it.export is None else it.export for name, it in self.objectives.items()}
        # The check that refuses all zeros reads these shares too.
        total = sum(shares.values()) or 1.0
        return {name: share / total for name, share in shares.items()}

    @property
    def served_similarity(self) -> Literal["cosine", "dot"]:
        """Return the similarity of the served score.

        A sum of several objectives' cosines is an inner product with a vector whose norm is not 1.
        """
        several = sum(share > 0 for share in self.export_shares.values()) > 1
        return "dot" if several else self.model.similarity

    @property
    def weighted_data(self) -> DataConfig:
        """Return `data` with event weights multiplied by the weights of their objectives."""
        events = self.data.events
        if not self.objectives or events is None:
            return self.data
        factor = {event: it.weight for it in self.objectives.values() for event in it.events}
        weights = {event: weight * factor.get(event, 1.0) for event, weight in events.weights.items()}
        return self.data.model_copy(update={"events": events.model_copy(update={"weights": weights})})

    def log_columns(self, unit: str | None) -> LogColumns:
        """Return how later logs are read: columns, and weights of types of events; `unit` is that of times."""
        data = self.weighted_data
        return LogColumns(
            query_id=data.query_id,
            label_id=data.label_id,
            timestamp=data.timestamp or "time",
            ticks=UNITS[unit] if unit else 1.0,
            event=data.events.column if data.events else None,
            weights=data.events.weights if data.events else {},
            negative=data.events.negative if data.events else [],
            weight=data.weight,
        )

    @property
    def objective_of_type(self) -> list[int] | None:
        """Return the objective's index for each type of `data.events.weights`, −1 for none; None without objectives."""
        if not self.objectives or self.data.events is None:
            return None
        indices = {event: i for i, it in enumerate(self.objectives.values()) for event in it.events}
        return [indices.get(event, -1) for event in self.data.events.by_type]

    @property
    def history_events(self) -> list[int] | None:
        """Return the indices in `data.events.weights` of the types in a query's history; None for all types."""
        events = next((feature.events for feature in self.query.features if feature.kind == "history"), [])
        types = list(self.data.events.weights) if self.data.events else []
        return [types.index(name) for name in events] or None

    @property
    def context_columns(self) -> list[str]:
        """List the interaction columns with values of query features."""
        return list(dict.fromkeys(feature.source for feature in self.query.features if feature.origin == "row"))

    @property
    def own_id(self) -> FeatureConfig | None:
        """Return the label feature that is the label's own id; None without one."""
        return next((feature for feature in self.label.features if feature.name == self.data.label_id), None)

    @property
    def describes_labels(self) -> bool:
        """Return whether labels have features other than their id."""
        return any(feature.name != self.data.label_id for feature in self.label.features)

    def label_unknown_rate(self, feature: FeatureConfig) -> float:
        """Return the share of a label feature's ids that become unknown in training."""
        if feature.unknown_rate is not None:
            return feature.unknown_rate
        return OWN_ID_UNKNOWN_RATE if feature.name == self.data.label_id and self.describes_labels else 0.0

    @property
    def table_columns(self) -> dict[str, list[str]]:
        """List the columns to read from each feature table, without ids."""
        columns = {"query": [self.data.valid_from] if self.data.valid_from else [], "label": list(self.data.display)}
        for side, tower, id_name in (
            ("query", self.query, self.data.query_id),
            ("label", self.label, self.data.label_id),
        ):
            columns[side] += [self.prior.since] if side == "label" and self.prior.since else []
            columns[side] += [
                feature.source
                for feature in tower.features
                if feature.kind not in NEIGHBOURS and feature.name != id_name and feature.origin == "table"
            ]
        columns["query"] += [name for name in self.evaluation.groups if name not in self.context_columns]
        return {side: list(dict.fromkeys(names)) for side, names in columns.items()}

    @property
    def resolved_patience(self) -> int | None:
        """Return the evaluations without a rise after which training stops; None if it never stops early."""
        patience = self.training.patience
        if patience is None:
            return 5 if self.optimizer.schedule == "constant" else None
        return patience or None

    @property
    def own_rows(self) -> dict[str, str]:
        """Return the origin of every custom row by kind and name (`weight damped`)."""
        loss = self.loss
        named = [("sampler", loss.sampler.name), ("weight", loss.weight.name), ("family", loss.family.name)]
        named += [*self.own_layers, *(("metric", metric.name) for metric in self.evaluation.metrics)]
        return {
            f"{kind} {name}": register.describe_origin(kind, name)
            for kind, name in named
            if name not in register.BUILT_IN[kind]
        }

    @property
    def own_layers(self) -> list[tuple[str, str]]:
        """List kind and name of every custom tower and custom feature kind."""
        sides = (self.query, self.label)
        kinds = [feature.custom_kind for side in sides for feature in side.features]
        towers = [("tower", side.tower.name) for side in sides if side.tower is not None]
        return [*towers, *(("feature", kind.name) for kind in kinds if kind is not None)]
