"""What a job will take: its steps, and the memory of its parts.

Legend: `B` batch, `M` negatives of a row, `D` dimensions, `L` labels.
"""

from __future__ import annotations

from dataclasses import dataclass

from longtail.bundle.sets import distinct
from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding

_COPIES = 4
"""Of the logits of a batch: themselves, their weights, their gradient, and what the loss keeps for it."""


@dataclass(frozen=True)
class Cost:
    """Steps, and bytes of what they need.

    Attributes:
        batch_size: B.
        negatives: M.
        steps_per_epoch: whole batches of an epoch.
        steps: of all epochs, at most.
        tables: bytes of embedding tables.
        optimizer: bytes of what the optimiser keeps for them.
        data: bytes of pairs, feature tables, the labels' inputs, and lists of retrieved negatives and of neighbours.
        batch: bytes of a step's logits, and of the cosines that neighbours are contrasted in.
        products: multiplications and additions of these and of their gradients.
    """

    batch_size: int
    negatives: int
    steps_per_epoch: int
    steps: int
    tables: int
    optimizer: int
    data: int
    batch: int
    products: int

    @property
    def memory(self) -> int:
        """Bytes of all of it, without the training framework itself."""
        return self.tables + self.optimizer + self.data + self.batch


def cost_of(recipe: Recipe, dataset: Dataset, encoding: Encoding) -> Cost:
    """The cost of a recipe on its data."""
    visits = dataset.training_queries() if recipe.data.reduction == "sample" else len(dataset.train)
    batch = min(recipe.training.batch_size, visits)
    sampler, labels = recipe.loss.sampler, len(dataset.label_ids)
    drawn = labels if sampler.name == "full" else sampler.negatives or 0
    retrieved = recipe.loss.retrieved_negatives
    drawn += 0 if retrieved is None else retrieved.negatives
    negatives = drawn + (batch if sampler.of_the_batch else 0)
    near = recipe.loss.neighbours
    sides = () if near is None else near.sides
    rows = {"query": len(dataset.query_ids), "label": labels}
    contrasted = negatives + batch * len(sides)
    tables = _tables(recipe, encoding, labels)
    numbers = sum(rows * width for rows, width in tables.values())
    slots = {"adam": 2.0, "adagrad_elementwise": 1.0, "sgd": 1.0 if any(recipe.optimizer.row_arguments.values()) else 0}
    by_row = sum(rows for rows, _ in tables.values())
    label_rows = {feature.table_name for feature in recipe.query.features if feature.reads_label_tower}
    untrained = len(label_rows) * (labels + 1) * recipe.model.dim
    kept = numbers * slots.get(recipe.optimizer.embeddings, 0.0)
    kept += by_row if recipe.optimizer.embeddings == "adagrad" else 0
    pairs = (dataset.train, dataset.valid, dataset.test)
    arrays = [array for each in pairs for array in (each.queries, each.labels, each.weights, each.times)]
    stored = [table for table in (dataset.query_table, dataset.label_table) if table is not None]
    return Cost(
        batch_size=batch,
        negatives=negatives,
        steps_per_epoch=visits // batch,
        steps=visits // batch * recipe.training.epochs,
        tables=4 * (numbers + untrained),
        optimizer=int(4 * kept),
        data=sum(array.nbytes for array in arrays if array is not None)
        + sum(table.nbytes for table in stored)
        + sum(column.nbytes for column in encoding.label_inputs.values())
        + (0 if encoding.audience is None else encoding.audience.nbytes)
        + (0 if retrieved is None else 4 * retrieved.depth * len(distinct(dataset.train.request_rows)))
        + (0 if near is None else 4 * near.k * sum(rows[side] for side in sides)),
        batch=4 * _COPIES * batch * contrasted,
        products=3 * 2 * batch * contrasted * recipe.model.dim,
    )


def _tables(recipe: Recipe, encoding: Encoding, labels: int) -> dict[str, tuple[int, int]]:
    """Rows and width of every embedding table, by name."""
    tables = {}
    for feature in (*recipe.query.features, *recipe.label.features):
        name = feature.entry_table if feature.reads_label_tower else feature.table_name
        if name in encoding.vocabulary_rows:
            tables[name] = encoding.vocabulary_rows[name], feature.dim
        elif feature.kind == "text":
            tables[feature.table_name] = feature.hash_rows, feature.dim
    if recipe.model.label_bias:
        tables["label bias"] = labels + 1, 1
    return tables
