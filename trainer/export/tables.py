"""Write large embedding tables as files `tables/NAME.npy`, outside ONNX.

Towers are exported with a few rows in place of a large table. The exported model then refers to the file as external
data. Neither the memory of an export nor the 2 GiB limit of ONNX therefore limits the size of a table.

Legend: `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from longtail.bundle.arrays import Float32
from longtail.bundle.bundle import TABLES, Bundle
from longtail.bundle.store import working_directory

if TYPE_CHECKING:
    from longtail.trainer.model.embedding import EmbeddingTable
    from longtail.trainer.model.towers import Towers

LEAST_BYTES = 1 << 20
"""Smallest size of a table in a file of its own, bytes; smaller tables stay in the model."""


def large_tables(towers: Towers) -> dict[str, tuple[str, EmbeddingTable]]:
    """Return large tables and their vocabularies by file name.

    A table is large from `LEAST_BYTES` on. Other tables of the same vocabulary are included, as they share its rows.
    """
    plain = {name: (name, table) for name, table in (towers.tables | towers.label_rows).items()}
    pairs = {
        f"pairs-{side}-{name}": (towers.readers[side, name], table) for (side, name), table in towers.pairs.items()
    }
    tables = plain | pairs
    large = {rows for rows, table in tables.values() if table.rows * table.dim * 4 >= LEAST_BYTES}
    return {file: (rows, table) for file, (rows, table) in tables.items() if rows in large}


def link_tables(model: bytes, stand_in: Mapping[str, Float32], files: Mapping[str, Path]) -> tuple[bytes, set[str]]:
    """Replace stand-ins [8, D] in a model by references to `files`; also return the names found."""
    graph = onnx.load_from_string(model)
    replaced = set()
    for tensor in graph.graph.initializer:
        for name, rows in stand_in.items():
            if list(tensor.dims) == list(rows.shape) and np.array_equal(numpy_helper.to_array(tensor), rows):
                _refer(tensor, files[name])
                replaced.add(name)
    return graph.SerializeToString(), replaced


def write_with_tables(bundle: Bundle, out: Path) -> Bundle:
    """Write a bundle with large tables in files `tables/SIDE-NUMBER.npy`."""
    towers = {"query": bundle.query_tower} | ({} if bundle.label_tower is None else {"label": bundle.label_tower})
    with working_directory(out) as folder:
        models, tables = _without_large_tables(towers, folder)
        return replace(bundle, query_tower=models["query"], label_tower=models.get("label"), tables=tables).write(out)


def _without_large_tables(models: Mapping[str, bytes], folder: Path) -> tuple[dict[str, bytes], dict[str, Path]]:
    written: dict[str, bytes] = {}
    files: dict[str, Path] = {}
    (folder / TABLES).mkdir()
    for side, content in models.items():
        model = onnx.load_from_string(content)
        looked_up, read = set[str](), set[str]()
        for node in model.graph.node:
            # The first input of Gather is the table; a tensor that any other input reads must stay whole.
            rows = 1 if node.op_type == "Gather" else 0
            looked_up.update(node.input[:rows])
            read.update(node.input[rows:])
        for tensor in model.graph.initializer:
            large = len(tensor.dims) == 2 and tensor.dims[0] * tensor.dims[1] * 4 >= LEAST_BYTES
            if large and tensor.data_type == TensorProto.FLOAT and tensor.name in looked_up - read:
                file = folder / TABLES / f"{side}-{len(files)}.npy"
                files[file.stem] = file
                np.save(file, numpy_helper.to_array(tensor))
                _refer(tensor, file)
        written[side] = model.SerializeToString()
    return written, files


def _refer(tensor: TensorProto, file: Path) -> None:
    table = np.load(file, mmap_mode="r", allow_pickle=False)
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    del tensor.dims[:]
    tensor.dims.extend(table.shape)
    tensor.data_location = TensorProto.EXTERNAL
    location = {"location": f"{TABLES}/{file.name}", "offset": table.offset, "length": table.nbytes}
    for key, value in location.items():
        tensor.external_data.add(key=key, value=str(value))
