"""Embedding tables in files next to the towers that read them."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.bundle import Bundle, BundleCorruptError, BundleInvariantError, Tower, TowerError
from tests.bundles import make_bundle, move_tables

QUERIES = [{"user_id": "u3", "history": ["item-1", "item-59"]}, {"user_id": "nobody"}]
LABELS = [{"item_id": "item-7", "genres": ["g1"], "year": 2}, {"genres": ["g0", "g3"]}]


@pytest.fixture(scope="module")
def full() -> Bundle:
    return make_bundle(label_tower=True)


@pytest.fixture
def separate(full: Bundle, tmp_path: Path) -> Bundle:
    (tmp_path / "export").mkdir()
    return move_tables(full, tmp_path / "export")


def embedded(bundle: Bundle, query: bytes | Path, label: bytes | Path) -> list[np.ndarray]:
    manifest, result = bundle.manifest, []
    for model, features, arguments, file in (
        (query, manifest.query_features, QUERIES, "query_tower.onnx"),
        (label, manifest.label_features, LABELS, "label_tower.onnx"),
    ):
        tower = Tower(model, features, bundle.vocabularies, manifest.dim, file=file)
        result.append(tower.embed(tower.read(arguments)))
    return result


def models(bundle: Bundle) -> tuple[bytes | Path, bytes | Path]:
    assert bundle.label_model is not None
    return bundle.query_model, bundle.label_model


@pytest.mark.parametrize("towers", [True, False], ids=["read", "mapped"])
def test_towers_with_table_files_compute_the_same(full: Bundle, separate: Bundle, tmp_path: Path, towers: bool) -> None:
    written = separate.write(tmp_path / "bundle")
    shutil.rmtree(tmp_path / "export")
    expected = embedded(full, *models(full))
    for bundle in (written, Bundle.load(tmp_path / "bundle", towers=towers)):
        assert sorted(bundle.tables) == ["genres", "items", "own", "users"]
        assert set(bundle.tables.values()) == set((tmp_path / "bundle" / "tables").iterdir())
        for result, same in zip(embedded(bundle, *models(bundle)), expected, strict=True):
            assert np.array_equal(result, same)
    tables = sum(np.load(written.tables[name]).nbytes for name in ("users", "items"))
    assert (tmp_path / "bundle" / "query_tower.onnx").stat().st_size < len(full.query_tower) - tables / 2


def test_tables_are_linked_or_copied(separate: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = separate.write(tmp_path / "linked")
    assert os.stat(linked.tables["users"]).st_ino == os.stat(separate.tables["users"]).st_ino

    def other_file_system(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", other_file_system)
    copied = Bundle.load(separate.write(tmp_path / "copied").path or tmp_path)
    assert os.stat(copied.tables["users"]).st_nlink == 1
    assert copied.tables["users"].read_bytes() == separate.tables["users"].read_bytes()


def test_unwritten_bundle_has_no_table_files(separate: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TowerError, match=r"query_tower\.onnx: expected a model .*: its tables must be files in tables"):
        embedded(separate, *models(separate))


def test_links_within_the_folder_run_and_others_are_refused(separate: Bundle, tmp_path: Path) -> None:
    separate.write(tmp_path / "bundle")
    (tmp_path / "linked").symlink_to(tmp_path / "bundle")
    embedded(separate, *models(Bundle.load(tmp_path / "linked")))
    cache, links = tmp_path / "cache", tmp_path / "links"
    for at, file in enumerate(sorted(path for path in (tmp_path / "bundle").rglob("*") if path.is_file())):
        stored, link = cache / f"{at:02}" / "content", links / file.relative_to(tmp_path / "bundle")
        stored.parent.mkdir(parents=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, stored)
        link.symlink_to(stored)
    bundle = Bundle.load(links)
    with pytest.raises(TowerError, match=r"query_tower\.onnx: .*links followed \(cp -rL\)"):
        embedded(bundle, *models(bundle))
    shutil.copytree(links, tmp_path / "followed", symlinks=False)
    copied = Bundle.load(tmp_path / "followed")
    for result, same in zip(
        embedded(copied, *models(copied)), embedded(separate, *models(make_bundle(label_tower=True))), strict=True
    ):
        assert np.array_equal(result, same)


def test_bundle_with_missing_tables_is_not_written(separate: Bundle, tmp_path: Path) -> None:
    bundle = Bundle.load(separate.write(tmp_path / "bundle").path or tmp_path)
    shutil.rmtree(tmp_path / "bundle" / "tables")
    with pytest.raises(BundleCorruptError, match=r"tables/\w+\.npy: expected a NumPy array file, found none"):
        bundle.write(tmp_path / "again")


def test_a_damaged_or_missing_table_is_named(separate: Bundle, tmp_path: Path) -> None:
    table = separate.write(tmp_path / "bundle").tables["items"]
    shutil.rmtree(tmp_path / "export")
    content = bytearray(table.read_bytes())
    content[-1] ^= 1
    table.write_bytes(content)
    with pytest.raises(BundleCorruptError, match=r"tables/items\.npy.*sha256"):
        Bundle.load(tmp_path / "bundle")
    table.unlink()
    with pytest.raises(BundleCorruptError, match=r"tables/items\.npy"):
        Bundle.load(tmp_path / "bundle", verify=False)


WRONG: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "other numbers": (
        lambda table: table.astype(np.float64),
        r"tables/items\.npy is float32 \[rows, dims\].*float64 \(61, 8\)",
    ),
    "columns": (np.asfortranarray, r"tables/items\.npy is stored row after row.*column after column"),
    "no table": (np.ravel, r"tables/items\.npy is float32.*float32 \(488,\)"),
    "rows missing": (lambda table: table[:-1], r"tables/items\.npy has a row for each id.*61 rows.*60 rows"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_table_with_another_number_of_rows_is_refused(
    separate: Bundle, tmp_path: Path, change: Callable[[np.ndarray], Any], message: str
) -> None:
    np.save(separate.tables["items"], change(np.load(separate.tables["items"])))
    with pytest.raises(BundleInvariantError, match=message):
        separate.write(tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_invalid_array_is_refused(separate: Bundle, tmp_path: Path) -> None:
    separate.tables["items"].write_bytes(b"rows")
    with pytest.raises(BundleCorruptError, match=r"items\.npy: expected a NumPy array file"):
        separate.write(tmp_path / "bundle")
