"""Export two PyTorch modules as a bundle: `pip install '.[torch]'`.

Legend: `C` example queries, `L` labels, `B` batch, `P` entries of a list, `D` dimensions.
"""

from __future__ import annotations

import inspect
import logging
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from pydantic import JsonValue
from torch import Tensor, nn

from longtail.bundle import Bundle, Feature, OnnxTower, Tower, TrainingFacts, Vocabulary, bundle_from_vectors
from longtail.bundle.arrays import Float32
from longtail.bundle.ids import id_text
from longtail.bundle.store import refuse_existing
from longtail.trainer.errors import ExportError
from longtail.trainer.export.tables import write_with_tables

__all__ = ["export_torch"]

Columns = Mapping[str, Any]
"""What a module takes, by name: [B] or [B, n] tensors or arrays, of indices (integers) or of numbers (floats)."""
Indices = Mapping[Any, int]
"""The index of every id, a string or an integer, in the module; None's is of unknown ids and of padding."""

_BATCH = 8192
_CHECKED = 256
_TOLERANCE = 1e-5
_UNKNOWN = "\0"
"""An id that no vocabulary has: stands for unknown ones inside a list."""


def export_torch(
    query: tuple[nn.Module, Columns],
    label: tuple[nn.Module, Columns],
    facts: TrainingFacts,
    *,
    vocabularies: Mapping[str, Indices],
    out: Path,
    left_padded: Collection[str] = (),
    label_tower: bool = False,
) -> Bundle:
    """Write a bundle that ranks at λ = 0 like the two modules.

    A module is called with its columns by keyword, or with a dict of them where its `forward` does not name them, or
    with the tensor where there is one column. `torch.onnx` exports it in evaluation mode; through the service's own
    encoder and ONNX Runtime the examples must give what the module gives, to 1e-5 of the largest number.

    Integers [B] become the feature kind `id`, integers [B, P] `history`, numbers [B] `number`, and numbers [B, n]
    `vector`. A missing number is the mean over the examples, a missing vector zeros.

    Args:
        query: the module of queries and example columns, on which index builds measure their recall; 1,000 queries
            that were not trained on are best.
        label: the module of labels and the columns of every label, L rows.
        facts: ids, counts and display columns of the labels, and similarity, temperature and noise of training; ids
            may be a list of strings or integers.
        vocabularies: the index of every id, by the name of each column of integers.
        left_padded: columns [B, P] whose padding comes first.
        label_tower: whether to export the module of labels, so that labels can be added while serving.

    Raises:
        ExportError: a column without a vocabulary, or a module that does not take the columns as float32 and int64 on
            the CPU, that ONNX cannot express, or computes otherwise.
        BundleInvariantError: rows that do not fit, or a vector of length 0 under a cosine.
        BundleExistsError: `out` exists.
    """
    out = Path(out)
    refuse_existing(out)
    unit = facts.similarity == "cosine"
    ids = [_text(id_.as_py() if isinstance(id_, pa.Scalar) else id_, "ids") for id_ in facts.ids]
    queries, labels = (
        _Side(module, columns, vocabularies, left_padded, unit, side)
        for side, (module, columns) in (("query", query), ("label", label))
    )
    if others := sorted({*left_padded} - {*queries.lists, *labels.lists}):
        raise ExportError(
            f"left_padded: {others[0]!r} is not allowed, because it is no column of integers [B, P]; use some of "
            f"{[*queries.lists, *labels.lists]}"
        )
    vectors_LD, queries_CD = labels.embeddings(), queries.embeddings()
    if vectors_LD.shape[1:] != queries_CD.shape[1:]:
        raise ExportError(
            f"label_module: vectors of shape {vectors_LD.shape[1:]} are not allowed, because the query module gives "
            f"{queries_CD.shape[1:]}; use one number of dimensions"
        )
    bundle = bundle_from_vectors(
        vectors_LD, replace(facts, ids=pa.array(ids, pa.string())), name=out.name, queries=queries_CD,
        query_tower=queries.exported(queries_CD),
        label_tower=labels.exported(vectors_LD, ids=ids) if label_tower else None,
    )  # fmt: skip
    return write_with_tables(bundle, out)


class _Column(NamedTuple):
    """Hold a column of examples, [B] or [B, n]; the module takes a `wide` one as [B, 1]."""

    name: str
    values: Tensor
    indices: dict[str | None, int] | None
    wide: bool
    left_padded: bool
    title: str

    @classmethod
    def read(cls, name: str, shape: Any, indices: Indices | None, left_padded: bool, title: str) -> _Column:
        """Read a column; raises ExportError."""
        values = torch.as_tensor(shape).detach().cpu()
        are_indices = not values.is_floating_point() and values.dtype != torch.bool
        if not name.isascii() or not name.isidentifier() or name.startswith("_"):
            raise ExportError(f"{title}: column {name!r} is not allowed; use a name of letters, digits and _")
        if values.ndim not in (1, 2) or not values.numel():
            raise ExportError(f"{title}: {name!r} of shape {list(values.shape)} is not allowed; use [B] or [B, n]")
        index_of = _check_indices(name, indices, values, title) if are_indices else None
        wide = values.ndim == 2 and values.shape[1] == 1
        values = values[:, 0] if wide else values
        if index_of is not None and values.ndim == 2 and values.shape[1] > 2:
            # One unknown id at an end may be an id; two are padding.
            unknown = values == index_of[None]
            begins, ends = unknown[:, :2].all(1), unknown[:, -2:].all(1)
            at_the_left, at_the_right = int((begins & ~ends).sum()), int((ends & ~begins).sum())
            if at_the_left > at_the_right if not left_padded else at_the_right > at_the_left:
                raise ExportError(
                    f"{title}: padding of {name!r} at the {'left' if left_padded else 'right'} is not allowed, because "
                    f"{at_the_left} of the examples begin with two of it and {at_the_right} end so; name columns whose "
                    "padding comes first in left_padded, and no others"
                )
        return cls(name, values if are_indices else values.float(), index_of, wide, left_padded, title)

    def shape(self, values: Tensor) -> Tensor:
        """Shape some values for the module."""
        return values[:, None] if self.wide else values

    @property
    def feature(self) -> Feature:
        """Say what a request gives."""
        many = self.values.ndim == 2
        if self.indices is not None and many:
            width = self.values.shape[1]
            return Feature(name=self.name, kind="history", vocabulary=self.name, max_length=width)
        if self.indices is not None:
            return Feature(name=self.name, kind="id", vocabulary=self.name)
        if many:
            return Feature(name=self.name, kind="vector", dims=self.values.shape[1], missing=None)
        return Feature(name=self.name, kind="number", missing=float(self.values.mean()))

    @property
    def vocabulary(self) -> Vocabulary:
        """List the ids, in the order of rows 1 to n."""
        return Vocabulary(pa.array([id_ for id_ in self.indices or {} if id_ is not None], pa.string()))

    def inputs(self) -> dict[str, Tensor]:
        """Make tower inputs to export with, two rows."""
        rows, feature = self.values[:1].expand(2, *self.values.shape[1:]), self.feature
        if self.indices is None:
            inputs = {self.name: rows.clone()}
            return inputs | ({f"{self.name}__missing": torch.zeros(2)} if feature.kind == "vector" else {})
        inputs = {self.name: torch.ones_like(rows, dtype=torch.int32)}
        return inputs | ({f"{self.name}__weight": torch.ones(rows.shape)} if feature.kind == "history" else {})

    def requests(self) -> list[JsonValue]:
        """Write the first examples as requests give them."""
        values = self.values[:_CHECKED]
        if self.indices is None:
            numbers: list[JsonValue] = values.double().tolist()
            return numbers
        id_of = {index: id_ for id_, index in self.indices.items() if id_ is not None}
        if values.ndim == 1:
            return [id_of.get(index) for index in values.tolist()]
        lists: list[JsonValue] = []
        for row in values.tolist():
            entries = row if self.left_padded else row[::-1]
            padding = next((i for i, index in enumerate(entries) if index != self.indices[None]), len(entries))
            ids = entries[padding:] if self.left_padded else entries[padding:][::-1]
            lists.append([id_of.get(index, _UNKNOWN) for index in ids])
        return lists

    def holds(self, ids: Sequence[str]) -> bool:
        """Return whether the column holds these ids, [B]."""
        if self.indices is None or self.values.ndim != 1 or len(ids) != len(self.values):
            return False
        return bool(self.values.tolist() == [self.indices.get(id_) for id_ in ids])


class _Renamed(nn.Module):
    """Compute a module's vectors of a tower's inputs: rows of vocabularies, weights and numbers."""

    def __init__(self, module: nn.Module, columns: Sequence[_Column], unit: bool) -> None:
        super().__init__()
        self.module, self.columns, self.unit = module, columns, unit
        for column in columns:
            if column.indices is not None:
                indices = [index for id_, index in column.indices.items() if id_ is not None]
                self.register_buffer(f"index_{column.name}", torch.tensor([column.indices[None], *indices]))

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Embed a batch, float32 [B, D]."""
        columns = {}
        for column in self.columns:
            values = inputs[column.name]
            if column.indices is not None:
                values = getattr(self, f"index_{column.name}")[values.long()]
            if column.left_padded:
                width = column.values.shape[1]
                lengths = inputs[f"{column.name}__weight"].sum(1, keepdim=True).long()
                # Turns each row round, so that the padding comes first, as the module expects.
                values = values.gather(1, (torch.arange(width) + lengths) % width)
            columns[column.name] = column.shape(values)
        return _call(self.module, columns, self.unit)


class _Side:
    """Hold one module with its examples."""

    def __init__(
        self, module: nn.Module, columns: Columns, vocabularies: Mapping[str, Indices], left_padded: Collection[str],
        unit: bool, side: str,
    ) -> None:  # fmt: skip
        title = f"{side}_module"
        self._module, self._unit, self._title = module, unit, title
        self._columns = [
            _Column.read(name, values, vocabularies.get(name), name in left_padded, title)
            for name, values in columns.items()
        ]
        self.lists = [column.name for column in self._columns if column.feature.kind == "history"]
        lengths = {column.name: len(column.values) for column in self._columns}
        if len(set(lengths.values())) != 1:
            raise ExportError(f"{title}: columns of {lengths} rows are not allowed; use one row for each example")

    def embeddings(self) -> Float32:
        """Compute the module's vectors of the examples, float32 [B, D]."""
        try:
            with _evaluating(self._module):
                parts = [
                    _call(
                        self._module,
                        {column.name: column.shape(column.values[rows]) for column in self._columns},
                        self._unit,
                    )
                    for rows in torch.arange(len(self._columns[0].values)).split(_BATCH)
                ]
        except (RuntimeError, TypeError, IndexError) as error:
            names = [column.name for column in self._columns]
            raise ExportError(
                f"{self._title}: expected a module on the CPU that takes {names} as float32 and int64, found: "
                f"{str(error).splitlines()[0]}"
            ) from error
        vectors: Float32 = torch.cat(parts).float().numpy()
        if vectors.ndim != 2:
            raise ExportError(f"{self._title}: vectors of shape {list(vectors.shape)} are not allowed; use [B, D]")
        return vectors

    def exported(self, embeddings_BD: Float32, ids: Sequence[str] | None = None) -> OnnxTower:
        """Export the module and check it on the first examples; `ids` are the ids of labels."""
        features = [column.feature for column in self._columns]
        vocabularies = {column.name: column.vocabulary for column in self._columns if column.indices is not None}
        requests = {column.name: column.requests() for column in self._columns}
        content = self._onnx()
        tower = Tower(content, features, vocabularies, embeddings_BD.shape[1], file=f"{self._title}.onnx")
        rows = [dict(zip(requests, row, strict=True)) for row in zip(*requests.values(), strict=True)]
        # A single row too: a row must not depend on the others of its batch.
        for batch in (rows, rows[:1]):
            expected_BD, found_BD = embeddings_BD[: len(batch)], tower.embed(tower.read(batch))
            error = float(np.abs(found_BD - expected_BD).max() / max(1.0, np.abs(expected_BD).max()))
            if not error <= _TOLERANCE:
                raise ExportError(
                    f"{self._title}: vectors that ONNX Runtime computes otherwise are not allowed, found {error:.2g} "
                    f"apart in a batch of {len(batch)}; use a module whose rows do not depend on each other"
                )
        own_id = next((column.name for column in self._columns if ids is not None and column.holds(ids)), None)
        return OnnxTower(content, features, vocabularies, own_id)

    def _onnx(self) -> bytes:
        inputs: dict[str, Tensor] = {}
        for column in self._columns:
            inputs |= column.inputs()
        batch = {name: {0: torch.export.Dim("batch", min=1)} for name in inputs}
        renamed = _Renamed(self._module, self._columns, self._unit)
        with _evaluating(renamed), _quiet(), tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tower.onnx")
            try:
                torch.onnx.export(
                    renamed, (), path, kwargs={"inputs": inputs}, dynamic_shapes={"inputs": batch}, dynamo=True,
                    input_names=[*inputs], output_names=["tower_vectors"], opset_version=18, external_data=False,
                    verbose=False,
                )  # fmt: skip
            except Exception as error:  # torch's exporter raises errors of any type
                raise ExportError(
                    f"{self._title}: expected a module that torch.onnx exports for batches of any size, found: {error}"
                ) from error
            return path.read_bytes()


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, without gradients."""
    training = {child: child.training for child in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for child, mode in training.items():
            child.training = mode


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's deprecation warnings and its log lines about torchvision."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _check_indices(name: str, indices: Indices | None, values: Tensor, title: str) -> dict[str | None, int]:
    """Return the index of every id, which all values are among; raises ExportError."""
    vocabulary = f"vocabularies[{name!r}]"
    if indices is None:
        raise ExportError(
            f"{title}: integers {name!r} without {vocabulary} are not allowed; use a dict of ids and their indices, or "
            "floats where they are numbers"
        )
    if None not in indices:
        raise ExportError(
            f"{title}: {vocabulary} has no index for unknown ids; use {{None: INDEX, …}}, such as a row that training "
            "has filled with rare ids"
        )
    index_of = {None if id_ is None else _text(id_, vocabulary): int(index) for id_, index in indices.items()}
    is_known = torch.isin(values, torch.tensor([*index_of.values()]))
    if not is_known.all():
        raise ExportError(
            f"{title}: {name!r} = {values[~is_known][0]} is not allowed, because {vocabulary} has no id of this index; "
            "use the dict that training used"
        )
    return index_of


def _text(id_: Any, title: str) -> str:
    """Return an id as a string; raises ExportError."""
    text = id_text(id_.item() if isinstance(id_, np.generic) else id_)
    if text is None:
        raise ExportError(f"{title}: the id {id_!r} is not allowed; use strings or integers")
    return text


def _call(module: nn.Module, columns: Mapping[str, Tensor], unit: bool) -> Tensor:
    if len(columns) == 1:
        vectors = module(*columns.values())
    elif columns.keys() <= inspect.signature(module.forward).parameters.keys():
        vectors = module(**columns)
    else:
        vectors = module(dict(columns))
    return nn.functional.normalize(vectors, dim=1) if unit else vectors
