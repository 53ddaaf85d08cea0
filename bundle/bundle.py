"""Write, load and validate a bundle: the one contract between trainer, index and service.

Legend: `L` labels, `D` embedding dimensions, `C` calibration queries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from pydantic import ValidationError

from longtail.bundle.arrays import Float32
from longtail.bundle.augment import Augmentation
from longtail.bundle.errors import BundleCorruptError, BundleInvariantError, BundleVersionError
from longtail.bundle.labels import Labels
from longtail.bundle.manifest import SCHEMA_VERSION, TREE_SCHEMA_VERSION, FileRecord, Manifest
from longtail.bundle.proposal import Proposal
from longtail.bundle.store import atomic_directory, sha256_of
from longtail.bundle.vocabulary import Vocabulary

MANIFEST = "manifest.json"
MANIFEST_SHA256 = "manifest.sha256"
LABELS = "labels.parquet"
EMBEDDINGS = "embeddings.npy"
CALIBRATION_QUERIES = "calibration_queries.npy"
QUERY_TOWER = "query_tower.onnx"
LABEL_TOWER = "label_tower.onnx"
PROPOSAL = "proposal.npz"
VOCABULARIES = "vocabularies"
_REQUIRED = (LABELS, EMBEDDINGS, CALIBRATION_QUERIES, QUERY_TOWER)
CONTRACT_FILES = (*_REQUIRED, LABEL_TOWER, PROPOSAL)
"""Beside manifest and vocabularies; any other file is a report."""

UNIT_NORM_TOLERANCE = 1e-3
_LOGSUMEXP_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Bundle:
    """A trained model, ready to be indexed and served; FORMAT.md has every file and rule.

    Attributes:
        manifest: what the bundle says about itself.
        labels: the label table, L rows.
        embeddings: float32 [L, D]; row i belongs to label row i.
        calibration_queries: float32 [C, D], query tower outputs of held-out queries; index builds measure
            their recall on them.
        query_tower: ONNX model, named inputs (`manifest.query_features`) → float32 [B, D].
        label_tower: ONNX model for labels' features, or None.
        vocabularies: by name.
        proposal: the tree p_n(y|x) of a model trained against adversarial negatives, or None.
        reports: further files kept with the model (report.html, metrics.json), by name.
        path: where it was loaded from; None before it is written.
    """

    manifest: Manifest
    labels: Labels
    embeddings: Float32
    calibration_queries: Float32
    query_tower: bytes
    label_tower: bytes | None = None
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    proposal: Proposal | None = None
    reports: Mapping[str, bytes] = field(default_factory=dict)
    path: Path | None = None

    @property
    def augmentation(self) -> Augmentation:
        """The constants of this model's rows and queries [METHODS §6]."""
        return Augmentation(self.manifest.temperature, self.manifest.kappa, self.manifest.kappa_bias)

    def rows(self) -> Float32:
        """Augmented label rows, float32 [L, D + 1 or 2]: what an index stores."""
        return self.augmentation.rows(self.embeddings, self.labels.log_pn, self.labels.bias)

    def write(self, target: Path) -> Bundle:
        """Validate, then write to `target` whole or not at all; returns the bundle with its checksums.

        Raises:
            BundleInvariantError: the bundle contradicts its contract; nothing is written.
            BundleExistsError: `target` is there already; nothing is changed.
            OSError: the disk is full or not writable; `target` stays absent.
        """
        self.validate()
        with atomic_directory(target) as working:
            self.labels.write(working / LABELS)
            np.save(working / EMBEDDINGS, self.embeddings, allow_pickle=False)
            np.save(working / CALIBRATION_QUERIES, self.calibration_queries, allow_pickle=False)
            (working / QUERY_TOWER).write_bytes(self.query_tower)
            if self.label_tower is not None:
                (working / LABEL_TOWER).write_bytes(self.label_tower)
            if self.proposal is not None:
                self.proposal.write(working / PROPOSAL)
            if self.vocabularies:
                (working / VOCABULARIES).mkdir()
            for name, vocabulary in self.vocabularies.items():
                vocabulary.write(working / VOCABULARIES / f"{name}.parquet")
            for name, content in self.reports.items():
                (working / name).write_bytes(content)
            files = {
                path.relative_to(working).as_posix(): FileRecord(sha256=sha256_of(path), bytes=path.stat().st_size)
                for path in sorted(working.rglob("*"))
                if path.is_file()
            }
            version = SCHEMA_VERSION if self.proposal is None else TREE_SCHEMA_VERSION
            manifest = self.manifest.model_copy(update={"files": files, "schema_version": version})
            (working / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
            (working / MANIFEST_SHA256).write_text(sha256_of(working / MANIFEST) + "\n", encoding="utf-8")
        return Bundle(**{**self.__dict__, "manifest": manifest, "path": target})

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Read and check a bundle; the embeddings stay on disk, memory-mapped.

        Raises:
            BundleCorruptError: not a bundle, a file missing, or a checksum that differs.
            BundleVersionError: written by a newer Longtail.
            BundleInvariantError: intact files that contradict the contract.
        """
        manifest = read_manifest(path)
        verify_files(path, manifest.files)
        for name in _REQUIRED:
            if name not in manifest.files:
                raise BundleCorruptError(
                    f"{path / MANIFEST}: expected {name!r} among its files, found {sorted(manifest.files)}"
                )
        label_tower = path / LABEL_TOWER
        bundle = cls(
            manifest=manifest,
            labels=Labels.read(path / LABELS),
            embeddings=_load_array(path / EMBEDDINGS),
            calibration_queries=_load_array(path / CALIBRATION_QUERIES),
            query_tower=(path / QUERY_TOWER).read_bytes(),
            label_tower=label_tower.read_bytes() if LABEL_TOWER in manifest.files else None,
            vocabularies={
                Path(name).stem: Vocabulary.read(path / name)
                for name in manifest.files
                if name.startswith(f"{VOCABULARIES}/")
            },
            proposal=Proposal.read(path / PROPOSAL) if PROPOSAL in manifest.files else None,
            path=path,
        )
        bundle.validate()
        return bundle

    def validate(self) -> None:
        """Check every invariant of FORMAT.md.

        Raises:
            BundleInvariantError: names the invariant, what it expects and what was found.
        """
        manifest, labels = self.manifest, self.labels
        shape = (manifest.labels, manifest.dim)
        _require(
            "embeddings.npy is float32 [labels, dim]",
            self.embeddings.dtype == np.float32 and self.embeddings.shape == shape,
            f"float32 {shape}",
            f"{self.embeddings.dtype} {self.embeddings.shape}",
        )
        queries = self.calibration_queries
        _require(
            "calibration_queries.npy is float32 [C >= 1, dim]",
            queries.dtype == np.float32 and queries.ndim == 2 and len(queries) > 0 and queries.shape[1] == manifest.dim,
            f"float32 (C, {manifest.dim})",
            f"{queries.dtype} {queries.shape}",
        )
        for name, array in (("embeddings.npy", self.embeddings), ("calibration_queries.npy", queries)):
            _require_finite(name, array)
            if manifest.similarity == "cosine":
                norms = np.sqrt(np.einsum("ij,ij->i", array, array))
                worst = int(np.abs(norms - 1).argmax())
                _require(
                    f"{name} has unit rows when similarity is cosine",
                    abs(norms[worst] - 1) <= UNIT_NORM_TOLERANCE,
                    f"norm 1 ± {UNIT_NORM_TOLERANCE}",
                    f"norm {norms[worst]:.6g} in row {worst}",
                )
        self._validate_labels()
        names = {
            feature.vocabulary for feature in (*manifest.query_features, *manifest.label_features) if feature.vocabulary
        }
        _require(
            "every feature's vocabulary is in vocabularies/",
            names <= set(self.vocabularies),
            sorted(names),
            sorted(self.vocabularies),
        )
        if self.proposal is not None:
            self._validate_proposal(self.proposal)
        _require(
            "display names the user's columns of labels.parquet",
            manifest.display == labels.display.column_names,
            manifest.display,
            labels.display.column_names,
        )

    def _validate_proposal(self, proposal: Proposal) -> None:
        proposal.validate(self.manifest.labels)
        rows = {
            feature.name: self.vocabularies[feature.vocabulary].rows if feature.vocabulary else feature.hash_rows or 1
            for feature in self.manifest.query_features
        }
        found = {name: len(projection) for name, projection in proposal.projection.items()}
        _require(
            "proposal.npz projects query features, a row for each row of their tables",
            found.items() <= rows.items(),
            f"some of {rows}",
            found,
        )

    def _validate_labels(self) -> None:
        labels, count = self.labels, self.manifest.labels
        _require(
            "labels.parquet has a row per label", len(labels.ids) == count, f"{count} rows", f"{len(labels.ids)} rows"
        )
        distinct = pc.count_distinct(labels.ids).as_py()
        _require("label ids are distinct", distinct == count, f"{count} distinct", f"{distinct} distinct")
        _require("counts are >= 0", bool((labels.counts >= 0).all()), ">= 0", labels.counts.min())
        _require_finite("labels.parquet column log_pn", labels.log_pn)
        log_pn = labels.log_pn.astype(np.float64)
        total = float(np.logaddexp.reduce(log_pn))
        _require(
            "log_pn is a distribution (natural log)",
            abs(total) <= _LOGSUMEXP_TOLERANCE,
            f"logsumexp 0 ± {_LOGSUMEXP_TOLERANCE}",
            f"{total:.6g}",
        )
        assigned = self.manifest.buckets.assign(labels.counts)
        wrong = np.flatnonzero(assigned != labels.buckets)
        _require(
            "buckets follow the manifest's thresholds",
            wrong.size == 0,
            "the thresholds' bucket in every row",
            f"{wrong.size} rows that differ, the first {wrong[:1].tolist()}",
        )
        has_bias = labels.bias is not None
        _require(
            "labels.parquet has a bias column when label_bias is set",
            has_bias == self.manifest.label_bias,
            self.manifest.label_bias,
            has_bias,
        )
        if labels.bias is not None:
            _require_finite("labels.parquet column bias", labels.bias)


def read_manifest(path: Path) -> Manifest:
    """Read manifest.json alone, checking its version before anything else.

    Raises:
        BundleCorruptError: no manifest, or not the JSON that a manifest is.
        BundleVersionError: a schema version this installation does not read.
    """
    try:
        content = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise BundleCorruptError(f"{path}: expected a bundle (a directory with {MANIFEST}), found none") from None
    try:
        version = json.loads(content)["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise BundleCorruptError(
            f"{path / MANIFEST}: expected JSON with a schema_version, found {content[:40]!r}… ({error})"
        ) from error
    if version not in (SCHEMA_VERSION, TREE_SCHEMA_VERSION):
        raise BundleVersionError(
            f"{path / MANIFEST}: schema version {version!r}, this installation reads {SCHEMA_VERSION} and "
            f"{TREE_SCHEMA_VERSION}: upgrade Longtail, or export the model again with this version"
        )
    _verify_manifest(path)
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        raise BundleCorruptError(f"{path / MANIFEST}: {error}") from error


def _verify_manifest(path: Path) -> None:
    """The manifest vouches for every other file; this one vouches for the manifest."""
    try:
        expected = (path / MANIFEST_SHA256).read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, IsADirectoryError):
        raise BundleCorruptError(f"{path / MANIFEST_SHA256}: expected the manifest's sha256, found no file") from None
    found = sha256_of(path / MANIFEST)
    if found != expected:
        raise BundleCorruptError(f"{path / MANIFEST}: expected sha256 {expected[:80]}, found {found}")


def verify_files(root: Path, files: Mapping[str, FileRecord]) -> None:
    """Check that every named file below `root` is there and is what was written.

    Raises:
        BundleCorruptError: a file is missing or differs in size or sha256.
    """
    for name, record in files.items():
        path = root / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BundleCorruptError(f"{root}: expected file names below the directory, found {name!r}")
        if not path.is_file():
            raise BundleCorruptError(f"{path}: expected a file of {record.bytes} bytes, found none")
        size = path.stat().st_size
        if size != record.bytes:
            raise BundleCorruptError(f"{path}: expected {record.bytes} bytes, found {size}")
        digest = sha256_of(path)
        if digest != record.sha256:
            raise BundleCorruptError(f"{path}: expected sha256 {record.sha256}, found {digest}")


def _load_array(path: Path) -> Float32:
    try:
        array: Float32 = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise BundleCorruptError(f"{path}: expected a NumPy array file: {error}") from error
    return array


def _require(invariant: str, holds: bool | np.bool, expected: object, found: object) -> None:
    if not holds:
        raise BundleInvariantError(invariant, expected=expected, found=found)


def _require_finite(name: str, array: Float32) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        row = int(np.argwhere(~finite)[0][0])
        raise BundleInvariantError(f"{name} is finite", expected="finite values", found=f"{array[row]} in row {row}")
