"""Data sets as memory-mapped files: the first job writes them, later jobs map them.

A folder `data.prepared/KEY/` holds `prepared.json`, an `.npy` for each array, and an Arrow file for each table. KEY is
a hash of all inputs of reading. The folder appears only once it is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longtail.bundle import BundleExistsError
from longtail.bundle.arrays import Array
from longtail.bundle.mapped_table import combine_chunks
from longtail.bundle.store import atomic_directory
from longtail.tables.lake import file_version
from longtail.tables.queries import find_all_files
from longtail.trainer.config import Recipe
from longtail.trainer.data.columns import Bags
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.loading import load_dataset
from longtail.trainer.data.pairs import Pairs, Requests
from longtail.trainer.data.problems import Problem, RowReport
from longtail.trainer.devices import first_before_others
from longtail.trainer.errors import DataError

_FORMAT = 3
_MANIFEST = "prepared.json"
_SPLITS = ("train", "valid", "test")
_TABLES = ("query_table", "label_table", "contexts")
_IDS = ("query_ids", "label_ids")
_MAPPED = 1 << 16
"""Size from which an array is mapped instead of read, bytes."""


def read_dataset(recipe: Recipe) -> Dataset:
    """Return the data of a recipe, prepared if the recipe sets `data.prepared`."""
    return load_dataset(**_list_arguments(recipe)) if recipe.data.prepared is None else prepare(recipe)[0]


def prepare(recipe: Recipe) -> tuple[Dataset, Path]:
    """Map or write the data of a recipe; return its folder too.

    The files are written if none exist for these settings and files. Prepared data of files that have changed since are
    removed.
    """
    root = recipe.data.prepared
    if root is None:
        raise DataError("data.prepared: expected a folder for the prepared data set, received none")
    files = _files(recipe)
    content = json.dumps({"format": _FORMAT, "files": files, "read": data_settings(recipe)}, sort_keys=True)
    folder = root / hashlib.sha256(content.encode()).hexdigest()[:16]
    with first_before_others("the prepared data set"):
        if not folder.exists():
            # Another job may have written the folder in the meantime.
            with suppress(BundleExistsError), atomic_directory(folder) as working:
                _write(load_dataset(**_list_arguments(recipe), folder=working), working, files)
            _remove_stale(root, current=folder)
        return _read(folder), folder


def _list_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `load_dataset`."""
    arguments: dict[str, Any] = {
        "data": recipe.data,
        "seed": recipe.seed,
        "columns": recipe.table_columns,
        "context": recipe.context_columns,
    }
    if recipe.objectives:
        arguments |= {"data": recipe.weighted_data, "objectives": recipe.objective_of_type}
    return arguments


def data_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that determine the content of a data set."""
    arguments = _list_arguments(recipe)
    # Where and in how much memory data are read does not change them.
    return arguments | {"data": arguments["data"].model_dump(mode="json", exclude={"prepared", "memory"})}


def _files(recipe: Recipe) -> list[tuple[str, int, int]]:
    """Return name, size and version of every file of a recipe."""
    sources = [getattr(recipe.data, name) for name in (*_SPLITS, "queries", "labels")]
    files = [file for source in sources if source is not None for file in find_all_files(source)]
    return [(file.name, *file_version(file)) for file in files]


def _write(dataset: Dataset, folder: Path, files: list[tuple[str, int, int]]) -> None:
    for name, array in dataset.arrays():
        if not (path := folder / f"{name}.npy").exists():  # reading has written the larger ones
            np.save(path, array, allow_pickle=False)
    for name in (*_IDS, *_TABLES):
        table = getattr(dataset, name)
        if table is not None:
            table = pa.table({"id": table}) if name in _IDS else table
            with pa.ipc.new_file(folder / f"{name}.arrow", table.schema) as file:
                file.write_table(table.combine_chunks())
    manifest = {
        "files": files,
        "ordered": dataset.ordered,
        "repeats": dataset.repeats,
        "read_at": dataset.read_at.isoformat(),
        "report": asdict(dataset.report),
        "fingerprint": dataset.fingerprint,
        "sizes": {path.name: path.stat().st_size for path in folder.iterdir()},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False), encoding="utf-8")


def _read(folder: Path) -> Dataset:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        # Sizes show a copy that was cut short; hashes would cost a read of all files.
        for name, size in manifest["sizes"].items():
            if (bytes_ := (folder / name).stat().st_size) != size:
                raise DataError(f"{folder / name}: expected {size} bytes, found {bytes_}: remove the folder")
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: expected a prepared data set: {error}: remove the folder") from error
    sizes = manifest["sizes"]

    def read_part(kind: type[Any], name: str) -> Any:
        names = {field.name: f"{name}.{field.name}.npy" for field in fields(kind)}
        arrays = {field: _array(folder / file) for field, file in names.items() if file in sizes}
        return kind(**arrays) if arrays else None

    tables: dict[str, Any] = {
        name: _table(folder / f"{name}.arrow") if f"{name}.arrow" in sizes else None for name in _TABLES
    }
    query_ids, label_ids = (combine_chunks(_table(folder / f"{name}.arrow")["id"]) for name in _IDS)
    report = RowReport(**manifest["report"])
    report.problems = [Problem(**problem) for problem in manifest["report"]["problems"]]
    report.unlisted = {side: (without, every, example) for side, (without, every, example) in report.unlisted.items()}
    dataset = Dataset(
        query_ids=query_ids,
        label_ids=label_ids,
        ordered=manifest["ordered"],
        requests=read_part(Requests, "requests"),
        impressions=read_part(Bags, "impressions"),
        read_at=datetime.fromisoformat(manifest["read_at"]),
        repeats=manifest["repeats"],
        report=report,
        **{split: read_part(Pairs, split) for split in _SPLITS},
        **tables,
    )
    vars(dataset)["fingerprint"] = manifest["fingerprint"]  # fills the cached property: no need to hash again
    return dataset


def _array(path: Path) -> Array:
    mapped = np.load(path, mmap_mode="r" if path.stat().st_size > _MAPPED else None, allow_pickle=False)
    array: Array = mapped.view(np.ndarray)  # slices of a `memmap` would be `memmap` objects too
    return array


def _table(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _remove_stale(root: Path, *, current: Path) -> None:
    """Remove data sets of former versions of the files of `current`."""
    files = {name: version for name, *version in json.loads((current / _MANIFEST).read_text(encoding="utf-8"))["files"]}
    for path in root.glob(f"[!.]*/{_MANIFEST}"):  # names of incomplete folders begin with a dot
        other_files = {name: version for name, *version in json.loads(path.read_text(encoding="utf-8"))["files"]}
        if any(files.get(name, version) != version for name, version in other_files.items()):
            shutil.rmtree(path.parent)
