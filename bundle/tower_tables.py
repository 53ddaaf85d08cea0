"""Embedding tables beside the ONNX towers that read them, which refer to them as external data [FORMAT.md].

A model that holds its tables ends at protobuf's 2 GiB, and is parsed and copied whole; a file of rows is neither.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from longtail.bundle.arrays import Float32
from longtail.bundle.errors import BundleCorruptError


def read_table(path: Path) -> Float32:
    """Rows of a table, float32 [rows, dims], memory-mapped."""
    try:
        array: Float32 = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise BundleCorruptError(f"{path}: expected a NumPy array file, found none") from error
    except (ValueError, EOFError) as error:
        raise BundleCorruptError(f"{path}: expected a NumPy array file: {error}") from error
    return array


def link_tables(tables: Mapping[str, Path], folder: Path) -> None:
    """Give files a second name in a folder, or copy them where the file system cannot link."""
    for name, path in tables.items():
        folder.mkdir(exist_ok=True)
        target = folder / f"{name}.npy"
        with suppress(OSError):
            os.link(path.resolve(), target)
            continue
        shutil.copyfile(path, target)
