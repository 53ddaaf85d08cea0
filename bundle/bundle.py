"""Write, load and check bundles.

Legend: `L` labels, `D` embedding dimensions, `C` calibration queries, `N` pairs of a calibration query and a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np

from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.bundle.augment import Augmentation
from longtail.bundle.cooccurrence import FILES, Cooccurrence
from longtail.bundle.display import check_displayable
from longtail.bundle.errors import BundleCorruptError, BundleInvariantError, require, require_array
from longtail.bundle.forecast import Forecast
from longtail.bundle.histories import REMEMBERED, REMEMBERED_IDS, Remembered, check_histories
from longtail.bundle.integrity import MANIFEST, MANIFEST_SHA256, read_manifest, record_files, verify_files
from longtail.bundle.labels import Labels
from longtail.bundle.manifest import SCHEMA_VERSION, Feature, Manifest
from longtail.bundle.mapped_table import read_table
from longtail.bundle.priors import Priors
from longtail.bundle.proposal import Proposal
from longtail.bundle.store import atomic_directory, file_sha256, link_or_copy
from longtail.bundle.tower import OnnxTower
from longtail.bundle.vocabulary import Vocabulary

LABELS = "labels.arrow"
EMBEDDINGS = "embeddings.npy"
CALIBRATION_QUERIES = "calibration_queries.npy"
CALIBRATION_SEEN = "calibration_seen.npy"
CALIBRATION_HISTORIES = "calibration_histories.npy"
QUERY_TOWER = "query_tower.onnx"
LABEL_TOWER = "label_tower.onnx"
PROPOSAL = "proposal.npz"
FORECAST = "forecast.arrow"
VOCABULARIES = "vocabularies"
TABLES = "tables"
_REQUIRED = (LABELS, EMBEDDINGS, CALIBRATION_QUERIES, QUERY_TOWER)
CONTRACT_FILES = (
    *_REQUIRED, CALIBRATION_SEEN, CALIBRATION_HISTORIES, LABEL_TOWER, PROPOSAL, FORECAST, *FILES, REMEMBERED,
    REMEMBERED_IDS,
)  # fmt: skip
"""Contract files, in addition to manifest, vocabularies, tables and label vectors; other files are reports."""

UNIT_NORM_TOLERANCE = 1e-3
"""Largest allowed distance of an embedding's norm from 1 with cosine similarity."""
_LOGSUMEXP_TOLERANCE = 1e-4
_SOFTWARE = ("longtail", "numpy", "pyarrow", "onnxruntime")


@dataclass(frozen=True)
class Bundle:
    """A trained model, ready to be indexed and served; FORMAT.md has every file and rule.

    Attributes:
        embeddings: float32 [L, D]; row i belongs to label row i.
        calibration_queries: float32 [C, D], query tower outputs of held-out queries, on which index builds measure
            recall.
        calibration_histories: int32 [C, R], rows of the last labels that each calibration query chose, oldest first, at
            the end of each row; −1 before. None without.
        calibration_seen: int32 [N, 2], pairs of a calibration query and a label that its answer leaves out, ascending;
            None where answers leave no label out by default.
        query_tower: ONNX model, named inputs (`manifest.query_features`) → float32 [B, D]. To run the model use
            `query_model`, whose folder has its tables.
        tables: files of the embedding tables that are not in the towers, float32 [rows, dims] each, by name; towers
            refer to them as `tables/NAME.npy`.
        proposal: the tree p_n(y|x) of a model trained against adversarial negatives, or None.
        forecast: forecast behind the labels' log π, if that is of a later period than training; None without one.
        cooccurrence: the term of co-occurrence; None without one.
        remembered: the last labels of every query of training; None if requests must give their history.
        reports: further files kept with the model (report.html, metrics.json), by name.
        priors: priors of the release that serves the bundle; the release stores them, `write` does not.
        path: directory of the bundle; None before it is written.
    """

    manifest: Manifest
    labels: Labels
    embeddings: Float32
    calibration_queries: Float32
    query_tower: bytes
    label_tower: bytes | None = None
    calibration_seen: Int32 | None = None
    calibration_histories: Int32 | None = None
    tables: Mapping[str, Path] = field(default_factory=dict)
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    proposal: Proposal | None = None
    forecast: Forecast | None = None
    cooccurrence: Cooccurrence | None = None
    remembered: Remembered | None = None
    reports: Mapping[str, bytes] = field(default_factory=dict)
    priors: Priors = field(default_factory=Priors)
    path: Path | None = None

    def __repr__(self) -> str:
        return f"Bundle({self.manifest.in_words()})"

    @cached_property
    def augmentation(self) -> Augmentation:
        """Return the constants of this model's rows and queries [METHODS §6]."""
        manifest = self.manifest
        return Augmentation(
            manifest.temperature,
            manifest.kappa,
            manifest.kappa_bias,
            manifest.kappa_popularity,
            tuple(prior.kappa for prior in self.priors.settings),
        )

    def stored_reports(self) -> dict[str, bytes]:
        """Read the reports of a loaded bundle, by name."""
        names = [name for name in self.manifest.files if name not in CONTRACT_FILES and "/" not in name]
        return {} if self.path is None else {name: (self.path / name).read_bytes() for name in names}

    @property
    def ranks_by_popularity(self) -> bool:
        """Return whether λ = 0 and μ = 1 rank by log π*; no with a forecast and another noise than π."""
        return self.forecast is None or self.forecast.offset is None

    @property
    def query_model(self) -> bytes | Path:
        """Get the query tower: its file, which finds its tables.

        Before the bundle is written there are only its bytes.
        """
        return self.query_tower if self.path is None else self.path / QUERY_TOWER

    @property
    def label_model(self) -> bytes | Path | None:
        """Get the label tower like `query_model`; None without one."""
        if self.path is None:
            return self.label_tower
        return self.path / LABEL_TOWER if LABEL_TOWER in self.manifest.files else None

    def rows(self, rows_R: Int64 | slice = slice(None)) -> Float32:
        """Compute augmented rows of labels, int64 [R], float32 [R, E]."""
        return self.augmentation.rows(self.embeddings[rows_R], *self.columns(rows_R))

    def columns(
        self, rows_R: Int64 | slice = slice(None)
    ) -> tuple[Float32, Float32 | None, Float32 | None, Float32 | None]:
        """Get log ν, biases, log π and priors of some labels: the arguments of `Augmentation.rows`."""
        labels = self.labels
        return (
            labels.log_pn[rows_R],
            None if labels.bias is None else labels.bias[rows_R],
            None if labels.log_popularity is None else labels.log_popularity[rows_R],
            self.priors.values_LP[rows_R] if self.priors.settings else None,
        )

    def write(self, target: str | Path) -> Bundle:
        """Validate, then write to `target` completely or not at all; returns the bundle with its checksums.

        Raises:
            BundleError: the bundle violates its contract, a table is missing, or `target` exists; nothing is changed.
            OSError: the disk is full or not writable; `target` stays absent.
        """
        # Loading trusts the checksums, so a bundle that breaks its contract must not get any.
        self.validate()
        target = Path(target)
        with atomic_directory(target) as working:
            self.labels.write(working / LABELS)
            np.save(working / EMBEDDINGS, self.embeddings, allow_pickle=False)
            np.save(working / CALIBRATION_QUERIES, self.calibration_queries, allow_pickle=False)
            if self.calibration_seen is not None:
                np.save(working / CALIBRATION_SEEN, self.calibration_seen, allow_pickle=False)
            if self.calibration_histories is not None:
                np.save(working / CALIBRATION_HISTORIES, self.calibration_histories, allow_pickle=False)
            (working / QUERY_TOWER).write_bytes(self.query_tower)
            if self.label_tower is not None:
                (working / LABEL_TOWER).write_bytes(self.label_tower)
            if self.tables:
                (working / TABLES).mkdir()
            for name, path in self.tables.items():
                link_or_copy(path, working / TABLES / f"{name}.npy")
            if self.proposal is not None:
                self.proposal.write(working / PROPOSAL)
            if self.forecast is not None:
                self.forecast.write(working / FORECAST)
            if self.cooccurrence is not None:
                self.cooccurrence.write(working)
            if self.remembered is not None:
                self.remembered.write(working)
            if self.vocabularies:
                (working / VOCABULARIES).mkdir()
            for name, vocabulary in self.vocabularies.items():
                vocabulary.write(working / VOCABULARIES / f"{name}.arrow")
            for name, content in self.reports.items():
                (working / name).write_bytes(content)
            # Last, because it has the checksums of all files above.
            update = {"files": record_files(working, working), "schema_version": SCHEMA_VERSION}
            manifest = self.manifest.model_copy(update=update)
            (working / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
            (working / MANIFEST_SHA256).write_text(file_sha256(working / MANIFEST) + "\n", encoding="utf-8")
        tables = {name: target / TABLES / f"{name}.npy" for name in self.tables}
        return replace(self, manifest=manifest, tables=tables, path=target)

    @classmethod
    def load(cls, path: str | Path, *, towers: bool = True, verify: bool = True) -> Bundle:
        """Read a bundle; embeddings, labels, vocabularies and label vectors stay on disk, memory-mapped.

        `write` and `longtail-index publish` check the invariants; the checksums prove that nothing changed since.

        Args:
            towers: read the towers. Otherwise the fields are b"" and None.
            verify: compare every byte with the sha256 of the manifest. Otherwise only sizes are compared.

        Raises:
            BundleError: there is no bundle, a file is missing or damaged, or the format is unknown.
        """
        path = Path(path)
        manifest = read_manifest(path)
        # Before a file is mapped: reading beyond the end of a cut file would kill the process.
        verify_files(path, manifest.files, content=verify)
        for name in _REQUIRED:
            if name not in manifest.files:
                raise BundleCorruptError(
                    f"{path / MANIFEST}: expected {name!r} among its files, found {sorted(manifest.files)}"
                )
        tables, vocabularies = (
            {Path(file).stem: path / file for file in manifest.files if file.startswith(f"{folder}/")}
            for folder in (TABLES, VOCABULARIES)
        )
        return cls(
            manifest=manifest,
            labels=Labels.read(path / LABELS, verify=verify),
            embeddings=read_table(path / EMBEDDINGS),
            calibration_queries=read_table(path / CALIBRATION_QUERIES),
            calibration_seen=np.load(path / CALIBRATION_SEEN) if CALIBRATION_SEEN in manifest.files else None,
            calibration_histories=(
                np.load(path / CALIBRATION_HISTORIES) if CALIBRATION_HISTORIES in manifest.files else None
            ),
            query_tower=(path / QUERY_TOWER).read_bytes() if towers else b"",
            label_tower=(path / LABEL_TOWER).read_bytes() if towers and LABEL_TOWER in manifest.files else None,
            tables=tables,
            vocabularies={name: Vocabulary.read(file, verify=verify) for name, file in vocabularies.items()},
            proposal=Proposal.read(path / PROPOSAL) if PROPOSAL in manifest.files else None,
            forecast=Forecast.read(path / FORECAST, verify=verify) if FORECAST in manifest.files else None,
            cooccurrence=None if manifest.cooccurrence is None else Cooccurrence.read(path, manifest.cooccurrence),
            remembered=Remembered.read(path, verify=verify) if REMEMBERED in manifest.files else None,
            path=path,
        )

    @classmethod
    def assemble(
        cls,
        labels: Labels,
        embeddings: Float32,
        calibration_queries: Float32,
        query_tower: OnnxTower,
        label_tower: OnnxTower | None,
        about: Mapping[str, Any],
        **files: Any,
    ) -> Bundle:
        """Create a bundle, with a manifest of what its parts say.

        A vocabulary of labels whose name another one of queries has is named `label_NAME`.

        Args:
            embeddings: float32 [L, D].
            calibration_queries: float32 [C, D].
            about: the other fields of the manifest: name, similarity, temperature, loss, dials, …
            files: other attributes of the bundle.
        """
        label_tower = label_tower or OnnxTower(None)
        fitted = Augmentation.fitted(
            about["temperature"], embeddings, labels.log_pn, labels.bias, labels.log_popularity
        )
        label_features, vocabularies = _merge_vocabularies(query_tower, label_tower)
        term, software = files.get("cooccurrence"), about.get("software", {})
        derived = {
            "schema_version": SCHEMA_VERSION, "created_at": datetime.now(UTC), "labels": len(labels.ids),
            "dim": embeddings.shape[1], "label_bias": labels.bias is not None, "kappa": fitted.kappa,
            "kappa_bias": fitted.kappa_bias, "kappa_popularity": fitted.kappa_popularity,
            "query_features": [*query_tower.features], "label_features": label_features, "own_id": label_tower.own_id,
            "display": labels.display.column_names, "cooccurrence": None if term is None else term.settings,
            "software": {name: version(name) for name in _SOFTWARE} | {"python": python_version()} | software,
        }  # fmt: skip
        manifest = Manifest(**{**about, **derived})
        return cls(
            manifest, labels, embeddings, calibration_queries, query_tower.onnx or b"", label_tower.onnx,
            vocabularies=vocabularies, **files,
        )  # fmt: skip

    def validate(self) -> None:
        """Check every invariant of FORMAT.md; raises BundleInvariantError."""
        _check(self)


def _merge_vocabularies(query: OnnxTower, label: OnnxTower) -> tuple[list[Feature], dict[str, Vocabulary]]:
    """Return the features of labels and the vocabularies of both towers."""
    merged, features = dict(query.vocabularies), list[Feature]()
    for feature in label.features:
        name = feature.vocabulary
        if name is not None:
            vocabulary = label.vocabularies[name]
            if name in merged and not merged[name].ids.equals(vocabulary.ids):
                name = f"label_{name}"
            merged[name] = vocabulary
        features.append(feature.model_copy(update={"vocabulary": name}))
    return features, merged


def _check(bundle: Bundle) -> None:
    manifest = bundle.manifest
    queries = bundle.calibration_queries
    require_array(EMBEDDINGS, bundle.embeddings, np.float32, labels=manifest.labels, dim=manifest.dim)
    require_array(CALIBRATION_QUERIES, queries, np.float32, C=None, dim=manifest.dim)
    require(f"{CALIBRATION_QUERIES} has a row", len(queries) > 0, "1 or more", len(queries))
    for name, array in ((EMBEDDINGS, bundle.embeddings), (CALIBRATION_QUERIES, queries)):
        _require_finite(name, array)
        if manifest.similarity == "cosine":
            # `einsum` makes no copy of the squares, which would be as large as the table.
            norms = np.sqrt(np.einsum("ij,ij->i", array, array))
            worst = int(np.abs(norms - 1).argmax())
            require(
                f"{name} has unit rows when similarity is cosine",
                bool(abs(norms[worst] - 1) <= UNIT_NORM_TOLERANCE),
                f"norm 1 ± {UNIT_NORM_TOLERANCE}",
                f"norm {norms[worst]:.6g} in row {worst}",
            )
    if bundle.calibration_seen is not None:
        _check_seen(bundle.calibration_seen, len(queries), manifest.labels)
    _check_labels(bundle)
    if bundle.forecast is not None:
        rows, served = len(bundle.forecast.first), bundle.labels.log_popularity is not None
        require(
            "forecast.arrow has a row per label", rows == manifest.labels, f"{manifest.labels} rows", f"{rows} rows"
        )
        require("labels.arrow has a log_popularity column when forecast.arrow exists", served, "a column", "none")
    settings = None if bundle.cooccurrence is None else bundle.cooccurrence.settings
    invariant = "the manifest describes the term of co-occurrence, if there is one"
    require(invariant, settings == manifest.cooccurrence, settings, manifest.cooccurrence)
    if bundle.cooccurrence is not None:
        bundle.cooccurrence.check(manifest.labels)
    if bundle.remembered is not None:
        bundle.remembered.check(manifest.labels)
    if bundle.calibration_histories is not None:
        check_histories(CALIBRATION_HISTORIES, bundle.calibration_histories, len(queries), manifest.labels)
    _check_features(bundle)
    _check_tables(bundle)
    if bundle.proposal is not None:
        _check_proposal(bundle)


def _check_seen(seen_N2: Int32, queries: int, labels: int) -> None:
    require_array(CALIBRATION_SEEN, seen_N2, np.int32, N=None, pair=2)
    outside = int(np.count_nonzero((seen_N2 < 0).any(axis=1) | (seen_N2 >= (queries, labels)).any(axis=1)))
    require(
        "calibration_seen.npy names calibration queries and labels", not outside, "rows that exist", f"{outside} others"
    )
    keys_N = seen_N2[:, 0].astype(np.int64) * labels + seen_N2[:, 1]
    require(
        "calibration_seen.npy is ascending", bool((np.diff(keys_N) > 0).all()), "distinct pairs, ascending", "others"
    )


def _check_labels(bundle: Bundle) -> None:
    manifest, labels, count = bundle.manifest, bundle.labels, bundle.manifest.labels
    require("labels.arrow has a row per label", len(labels.ids) == count, f"{count} rows", f"{len(labels.ids)} rows")
    labels.rows_by_id.check("labels.arrow")
    require("counts are >= 0", bool((labels.counts >= 0).all()), ">= 0", labels.counts.min())
    _require_distribution("log_pn", labels.log_pn)
    has_column, expected = labels.log_popularity is not None, manifest.kappa_popularity is not None
    invariant = "labels.arrow has a log_popularity column when kappa_popularity is set"
    require(invariant, has_column == expected, expected, has_column)
    if labels.log_popularity is not None:
        _require_distribution("log_popularity", labels.log_popularity)
    wrong = np.flatnonzero(manifest.buckets.assign(labels.counts) != labels.buckets)
    others = f"{wrong.size} rows that differ, the first {wrong[:1].tolist()}"
    require("buckets follow the manifest's thresholds", wrong.size == 0, "the thresholds' bucket in every row", others)
    has_column, expected = labels.bias is not None, manifest.label_bias
    require("labels.arrow has a bias column when label_bias is set", has_column == expected, expected, has_column)
    if labels.bias is not None:
        _require_finite("labels.arrow column bias", labels.bias)
    display = labels.display.column_names
    require("display names the user's columns of labels.arrow", manifest.display == display, manifest.display, display)
    for name in display:
        check_displayable(name, labels.display[name])


def _check_features(bundle: Bundle) -> None:
    manifest = bundle.manifest
    ids = [feature.name for feature in manifest.label_features if feature.kind == "id"]
    own_id = manifest.own_id
    require("own_id names an id among the label features", own_id is None or own_id in ids, ids, own_id)
    features = (*manifest.query_features, *manifest.label_features)
    names = {feature.vocabulary for feature in features if feature.vocabulary}
    stored = sorted(bundle.vocabularies)
    require("every feature's vocabulary is in vocabularies/", names <= {*stored}, sorted(names), stored)
    for name, vocabulary in bundle.vocabularies.items():
        vocabulary.check(f"{name}.arrow")


def _check_tables(bundle: Bundle) -> None:
    for name, path in bundle.tables.items():
        array, file = read_table(path), f"{TABLES}/{name}.npy"
        require_array(file, array, np.float32, rows=None, dims=None)
        require(f"{file} is stored row after row", array.flags.c_contiguous, "rows", "column after column")
        if name in bundle.vocabularies:
            rows, invariant = bundle.vocabularies[name].rows, "has a row for each id of its vocabulary, and row 0"
            require(f"{file} {invariant}", len(array) == rows, f"{rows} rows", f"{len(array)} rows")


def _check_proposal(bundle: Bundle) -> None:
    manifest, proposal = bundle.manifest, bundle.proposal
    assert proposal is not None
    proposal.validate(manifest.labels)
    rows = {
        feature.name: bundle.vocabularies[feature.vocabulary].rows if feature.vocabulary else feature.hash_rows or 1
        for feature in manifest.query_features
    }
    table_rows = {name: len(projection) for name, projection in proposal.projection.items()}
    invariant = "proposal.npz projects query features, a row for each row of their tables"
    require(invariant, table_rows.items() <= rows.items(), f"some of {rows}", table_rows)
    least = manifest.bias_removal.minimum
    invariant = "a tree's dial does not go below 0, where no search finds the best labels"
    require(invariant, least >= 0, "bias_removal.minimum >= 0", least)
    invariant = "log_pn is log π with a tree, because the tree is the noise"
    require(invariant, bundle.labels.log_popularity is None, "no column log_popularity", "one")


def _require_distribution(name: str, log_p_L: Float32) -> None:
    _require_finite(f"labels.arrow column {name}", log_p_L)
    total = float(np.logaddexp.reduce(log_p_L.astype(np.float64)))
    expected = f"logsumexp 0 ± {_LOGSUMEXP_TOLERANCE}"
    require(f"{name} is a distribution (natural log)", abs(total) <= _LOGSUMEXP_TOLERANCE, expected, f"{total:.6g}")


def _require_finite(name: str, array: Float32) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        row = int(np.argwhere(~finite)[0][0])
        raise BundleInvariantError(f"{name} is finite", expected="finite values", actual=f"{array[row]} in row {row}")
