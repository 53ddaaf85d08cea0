"""Write and load a bundle: the one contract between trainer, index and service.

Legend: `L` labels, `D` embedding dimensions, `C` calibration queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from longtail.bundle.arrays import Float32, Int64
from longtail.bundle.augment import Augmentation
from longtail.bundle.errors import BundleCorruptError
from longtail.bundle.integrity import MANIFEST, MANIFEST_SHA256, read_manifest, verify_files
from longtail.bundle.invariants import check_invariants
from longtail.bundle.label_vectors import check_label_vectors
from longtail.bundle.labels import Labels
from longtail.bundle.manifest import SCHEMA_VERSION, FileRecord, Manifest
from longtail.bundle.mapped_tables import MappedTables
from longtail.bundle.priors import Priors
from longtail.bundle.proposal import Proposal
from longtail.bundle.store import atomic_directory, sha256_of
from longtail.bundle.tower_tables import check_tables, link_tables, read_table
from longtail.bundle.vocabulary import Vocabulary

LABELS = "labels.arrow"
EMBEDDINGS = "embeddings.npy"
CALIBRATION_QUERIES = "calibration_queries.npy"
QUERY_TOWER = "query_tower.onnx"
LABEL_TOWER = "label_tower.onnx"
PROPOSAL = "proposal.npz"
VOCABULARIES = "vocabularies"
LABEL_VECTORS = "label_vectors"
TABLES = "tables"
_REQUIRED = (LABELS, EMBEDDINGS, CALIBRATION_QUERIES, QUERY_TOWER)
CONTRACT_FILES = (*_REQUIRED, LABEL_TOWER, PROPOSAL)
"""Beside manifest, vocabularies, tables and label vectors; any other file is a report."""


@dataclass(frozen=True)
class Bundle:
    """A trained model, ready to be indexed and served; FORMAT.md has every file and rule.

    Attributes:
        manifest: what the bundle says about itself.
        labels: the label table, L rows.
        embeddings: float32 [L, D]; row i belongs to label row i.
        calibration_queries: float32 [C, D], query tower outputs of held-out queries; index builds measure
            their recall on them.
        query_tower: ONNX model, named inputs (`manifest.query_features`) → float32 [B, D]. Whoever runs it takes
            `query_model`, whose folder has its tables.
        label_tower: ONNX model for labels' features, or None.
        tables: files of the embedding tables that are not in the towers, float32 [rows, dims] each, by name; towers
            refer to them as `tables/NAME.npy`.
        vocabularies: by name.
        proposal: the tree p_n(y|x) of a model trained against adversarial negatives, or None.
        label_vectors: float32 [L, dims] of the label features that queries give by label id, by name; NaN of a label
            without a vector.
        reports: further files kept with the model (report.html, metrics.json), by name.
        priors: of the release that serves it, which keeps them: `write` does not; None without any.
        path: where it was loaded from; None before it is written.
    """

    manifest: Manifest
    labels: Labels
    embeddings: Float32
    calibration_queries: Float32
    query_tower: bytes
    label_tower: bytes | None = None
    tables: Mapping[str, Path] = field(default_factory=dict)
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    proposal: Proposal | None = None
    label_vectors: Mapping[str, Float32] = field(default_factory=dict)
    reports: Mapping[str, bytes] = field(default_factory=dict)
    priors: Priors | None = None
    path: Path | None = None

    @property
    def augmentation(self) -> Augmentation:
        """The constants of this model's rows and queries [METHODS §6]."""
        manifest = self.manifest
        return Augmentation(
            manifest.temperature,
            manifest.kappa,
            manifest.kappa_bias,
            manifest.kappa_popularity,
            () if self.priors is None else self.priors.kappas,
        )

    @property
    def query_model(self) -> bytes | Path:
        """The query tower, or its file if that was not read or has tables beside it: of a bundle with other towers and
        the `path` of one that it was made of, the file's."""
        whole = self.query_tower and not self.tables
        return self.query_tower if whole or self.path is None else self.path / QUERY_TOWER

    @property
    def label_model(self) -> bytes | Path | None:
        """The label tower, or its file if that was not read or has tables beside it; None if there is none."""
        whole = self.label_tower is not None and not self.tables
        if whole or self.path is None or LABEL_TOWER not in self.manifest.files:
            return self.label_tower
        return self.path / LABEL_TOWER

    def rows(self, rows_R: Int64 | slice = slice(None)) -> Float32:
        """Augmented label rows, float32 [L, E] or those of some labels, int64 [R]: what an index stores."""
        labels = self.labels
        return self.augmentation.rows(
            self.embeddings[rows_R],
            labels.log_pn[rows_R],
            None if labels.bias is None else labels.bias[rows_R],
            None if labels.log_popularity is None else labels.log_popularity[rows_R],
            None if self.priors is None else self.priors.values_LP[rows_R],
        )

    def write(self, target: Path) -> Bundle:
        """Validate, then write to `target` whole or not at all; returns the bundle with its checksums.

        Raises:
            BundleInvariantError: the bundle contradicts its contract; nothing is written.
        BundleCorruptError: a file of its tables is gone, or no array.
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
            link_tables(self.tables, working / TABLES)
            if self.proposal is not None:
                self.proposal.write(working / PROPOSAL)
            if self.vocabularies:
                (working / VOCABULARIES).mkdir()
            for name, vocabulary in self.vocabularies.items():
                vocabulary.write(working / VOCABULARIES / f"{name}.parquet")
            if self.label_vectors:
                (working / LABEL_VECTORS).mkdir()
            for name, vectors in self.label_vectors.items():
                np.save(working / LABEL_VECTORS / f"{name}.npy", vectors, allow_pickle=False)
            for name, content in self.reports.items():
                (working / name).write_bytes(content)
            files = {
                path.relative_to(working).as_posix(): FileRecord(sha256=sha256_of(path), bytes=path.stat().st_size)
                for path in sorted(working.rglob("*"))
                if path.is_file()
            }
            manifest = self.manifest.model_copy(update={"files": files, "schema_version": SCHEMA_VERSION})
            (working / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
            (working / MANIFEST_SHA256).write_text(sha256_of(working / MANIFEST) + "\n", encoding="utf-8")
        tables = {name: target / TABLES / f"{name}.npy" for name in self.tables}
        return Bundle(**{**self.__dict__, "manifest": manifest, "tables": tables, "path": target})

    @classmethod
    def load(
        cls, path: Path, *, towers: bool = True, tables: MappedTables | None = None, verify: bool = True
    ) -> Bundle:
        """Read and check a bundle; embeddings and label vectors stay on disk, memory-mapped.

        Args:
            path: its directory.
            towers: whether to read the towers; else they are b"" and None, and `query_model` and `label_model` are
                their files, which a `Tower` maps.
            tables: the vocabularies and what finds labels, as a release keeps them, to be mapped; None: read and made.
            verify: whether to read every byte and check every invariant; False of files that were so, and were not
                written since. Their sizes are looked at all the same.

        Raises:
            BundleCorruptError: not a bundle, a file missing, or a checksum that differs.
            BundleVersionError: written in another format.
            BundleInvariantError: intact files that contradict the contract.
        """
        manifest = read_manifest(path)
        verify_files(path, manifest.files, content=verify)
        for name in _REQUIRED:
            if name not in manifest.files:
                raise BundleCorruptError(
                    f"{path / MANIFEST}: expected {name!r} among its files, found {sorted(manifest.files)}"
                )
        labels = Labels.read(path / LABELS, lookup=tables.lookup if tables else None, verify=verify)

        def vocabulary(name: str) -> Vocabulary:
            if tables:
                return tables.vocabulary(name, labels, verify=verify)
            # Queries are often histories of labels.
            return Vocabulary.read(path / VOCABULARIES / f"{name}.parquet").sharing(labels)

        bundle = cls(
            manifest=manifest,
            labels=labels,
            embeddings=read_table(path / EMBEDDINGS),
            calibration_queries=read_table(path / CALIBRATION_QUERIES),
            query_tower=(path / QUERY_TOWER).read_bytes() if towers else b"",
            label_tower=(path / LABEL_TOWER).read_bytes() if towers and LABEL_TOWER in manifest.files else None,
            tables={name: path / file for name, file in _in(TABLES, manifest)},
            vocabularies={name: vocabulary(name) for name, _ in _in(VOCABULARIES, manifest)},
            proposal=Proposal.read(path / PROPOSAL) if PROPOSAL in manifest.files else None,
            label_vectors={name: read_table(path / file) for name, file in _in(LABEL_VECTORS, manifest)},
            path=path,
        )
        if verify:
            bundle.validate()
        return bundle

    def validate(self) -> None:
        """Check every invariant of FORMAT.md.

        Raises:
            BundleInvariantError: names the invariant, what it expects and what was found.
        """
        check_invariants(
            self.manifest,
            self.labels,
            self.embeddings,
            self.calibration_queries,
            self.vocabularies,
            self.proposal,
        )
        check_label_vectors(self.manifest, self.label_vectors)
        check_tables(self.tables, self.vocabularies)


def _in(folder: str, manifest: Manifest) -> list[tuple[str, str]]:
    """Names and files of a folder of the bundle."""
    return [(Path(file).stem, file) for file in manifest.files if file.startswith(f"{folder}/")]
