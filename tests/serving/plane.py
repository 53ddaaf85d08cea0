"""A model small enough to work by hand: four labels and three queries in the plane, T = 1/2, no ONNX, no FAISS.

| row | id | count | bucket | p_n | v | u·v/T for `east` (1, 0) | for `north` (0, 1) |
|---|---|---|---|---|---|---|---|
| 0 | a | 8 | head | 1/2 | (1, 0) | 2 | 0 |
| 1 | b | 4 | torso | 1/4 | (0, 1) | 0 | 2 |
| 2 | c/é | 1 | tail | 1/8 | (0.75, 0.9) | 1.5 | 1.8 |
| 3 | 4 | 1 | tail | 1/8 | (−1, −0.5) | −2 | −1 |

An unknown user is (0, 0): only λ·log p_n counts. The release's default λ is 0.5, from −1 to 2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from pydantic import JsonValue

from longtail.bundle import (
    BiasRemoval,
    Buckets,
    Bundle,
    Feature,
    FeatureReader,
    Features,
    Inputs,
    LabelRecord,
    Labels,
    Loss,
    Manifest,
    Tower,
    Vocabulary,
)
from longtail.index import Filter, IndexSpec, Releases, Searcher
from longtail.index.building.tuning import tune_index
from longtail.index.search.eligible import Eligible
from longtail.serving import Retriever, Settings
from longtail.serving.core.answers import Retrieval
from longtail.serving.core.overlay import Overlay
from longtail.serving.core.ranking import LabelSearcher

FEATURES = [
    Feature(name="user", kind="id", vocabulary="users"),
    Feature(name="seen", kind="history", vocabulary="users", max_length=2),
    Feature(name="tags", kind="bag", vocabulary="users", max_length=3),
    Feature(name="words", kind="text", hash_rows=11, max_length=3),
    Feature(name="age", kind="number", missing=7.5),
]
VOCABULARIES = {"users": Vocabulary(pa.array(["north", "east"]))}


class PlaneEncoder:
    """Looks the user's vector up; the other features are read, checked and not used."""

    features: Sequence[Feature] = FEATURES

    def __init__(self) -> None:
        self._reader = FeatureReader(FEATURES, VOCABULARIES)

    def example(self) -> dict[str, JsonValue]:
        return self._reader.example()

    def read(self, features_B: Sequence[Features]) -> Inputs:
        return self._reader.read(features_B)

    def embed(self, inputs: Inputs) -> np.ndarray:
        users = np.array([[0, 0], [0, 1], [1, 0]], np.float32)
        return users[inputs["user"]]


class ExactSearcher:
    """Scores every label row; the meaning of `index.Searcher` in ten lines."""

    def __init__(self, bundle: Bundle, hidden_R: np.ndarray | None = None) -> None:
        self.labels = bundle.manifest.labels
        self.hidden_R = np.empty(0, np.int64) if hidden_R is None else hidden_R
        self._bundle = bundle
        self._rows_LE = bundle.rows()
        self._buckets_L = bundle.labels.buckets

    def without(self, rows_R: np.ndarray) -> ExactSearcher:
        assert rows_R.dtype == np.int64
        return ExactSearcher(self._bundle, np.union1d(self.hidden_R, rows_R))

    def restrict(self, eligible: Eligible) -> ExactSearcher:
        return self.without(np.setdiff1d(np.arange(self.labels), eligible.rows))

    def search(
        self, queries_BE: np.ndarray, k: int, filters: Sequence[Filter | None] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        scores_BL = queries_BE @ self._rows_LE.T
        scores_BL[:, self.hidden_R] = -np.inf
        for query, filter_ in enumerate(filters or [None] * len(scores_BL)):
            scores_L = scores_BL[query]
            if filter_ is not None:
                filter_.check(self.labels, query)
            if filter_ is not None and filter_.exclude is not None:
                scores_L[filter_.exclude] = -np.inf
            if filter_ is not None and filter_.allow is not None:
                scores_L[np.setdiff1d(np.arange(self.labels), filter_.allow)] = -np.inf
            if filter_ is not None and filter_.buckets is not None:
                scores_L[~np.isin(self._buckets_L, list(filter_.buckets))] = -np.inf
            if filter_ is not None and filter_.selection is not None:
                scores_L[~filter_.selection.mask] = -np.inf
        rows_Bk = np.argsort(-scores_BL, axis=1, kind="stable")[:, :k]
        found_Bk = np.take_along_axis(scores_BL, rows_Bk, axis=1)
        return found_Bk, np.where(np.isneginf(found_Bk), -1, rows_Bk)

    def scores(self, query_E: np.ndarray, rows_R: np.ndarray, filter_: Filter | None = None) -> np.ndarray:
        scores_1L, rows_1L = self.search(query_E[None], self.labels, [filter_])
        scores_L = np.full(self.labels, -np.inf, np.float32)
        scores_L[rows_1L[rows_1L >= 0]] = scores_1L[rows_1L >= 0]
        return scores_L[rows_R]

    def all_scores(self, queries_BE: np.ndarray, filters: Sequence[Filter | None]) -> None:
        """Say that the labels are too many, so that candidates are merged as those of an approximate index."""


def plane_bundle(prefix: str = "") -> Bundle:
    """The plane; every label's id may start with something that tells two releases apart."""
    counts = np.array([8, 4, 1, 1])
    embeddings = np.array([[1, 0], [0, 1], [0.75, 0.9], [-1, -0.5]], np.float32)
    bundle = Bundle(
        manifest=Manifest(
            schema_version=1,
            name="plane",
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
            labels=4,
            dim=2,
            similarity="dot",
            temperature=0.5,
            label_bias=False,
            kappa=0.3,
            loss=Loss(family="softmax", sampler="in_batch", weight="unit"),
            query_features=FEATURES,
            display=["title", "year"],
            buckets=Buckets(scheme="count", head_above=7, tail_upto=3),
            bias_removal=BiasRemoval(default=0.5),
            training_data={"fingerprint": "0" * 64},
            software={"longtail": "0.1.0"},
        ),
        labels=Labels(
            ids=pa.array([f"{prefix}{id_}" for id_ in ("a", "b", "c/é", "4")]),
            counts=counts,
            log_pn=np.log([1 / 2, 1 / 4, 1 / 8, 1 / 8]).astype(np.float32),
            buckets=np.array([0, 1, 2, 2], np.int8),
            bias=None,
            display=pa.table({"title": ["Alpha", "Beta", "Gamma", "Four"], "year": [1999, None, 2001, 2002]}),
        ),
        embeddings=embeddings,
        calibration_queries=np.array([[1, 0]], np.float32),
        query_tower=b"",
        vocabularies=VOCABULARIES,
    )
    bundle.validate()
    return bundle


def plane_retriever(
    name: str = "plane-1", prefix: str = "", *, bundle: Bundle | None = None, day: int = 2
) -> Retriever:
    bundle = bundle or plane_bundle(prefix)
    return Retriever(
        name=name,
        created_at=datetime(2026, 1, day, tzinfo=UTC),
        bundle=bundle,
        searcher=ExactSearcher(bundle),
        encoder=PlaneEncoder(),
    )


class PlaneLoader:
    """Loads the plane under any name but broken ones, and keeps the names."""

    def __init__(self, *broken: str) -> None:
        self.broken = set(broken)
        self.loaded_names: list[str] = []

    def __call__(self, _: Releases, name: str) -> Retriever:
        self.loaded_names.append(name)
        if name in self.broken:
            raise ValueError(f"{name}: expected sha256 aa, found bb")
        return plane_retriever(name)


def make_retriever(
    bundle: Bundle, spec: str | LabelSearcher = "exact", *records: LabelRecord, name: str = "r"
) -> Retriever:
    """Serve a bundle after changes of its labels: by NumPy, by a searcher, or by an index that visits every list."""
    manifest = bundle.manifest
    if spec == "exact":
        spec = ExactSearcher(bundle)
    if isinstance(spec, str):
        built = tune_index(bundle, IndexSpec(spec, recall_floor=0.0), lambda _: None)
        params = built.chosen.params.model_copy(update={} if spec == "flat" else {"nprobe": 10_000})
        spec = Searcher(bundle, built.index, params)
    retriever = Retriever(
        name=name,
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
        bundle=bundle,
        searcher=spec,
        encoder=Tower(bundle.query_tower, manifest.query_features, bundle.vocabularies, manifest.dim),
        max_new_labels=100,
    )
    return retriever.with_changes(records)


def read_results(retrieval: Retrieval) -> list[dict[str, Any]]:
    """The results of a retrieval, read from their JSON."""
    return json.loads(orjson.dumps(retrieval.explain().results, option=orjson.OPT_SERIALIZE_NUMPY))


def plane_settings(releases: Path, **changes: object) -> Settings:
    """Settings whose constants, such as `max_features_bytes`, can be changed, too."""
    values = {"releases": releases, "max_queries": 5, "max_body_bytes": 50_000, **changes}
    settings = type("PlaneSettings", (Settings,), {})
    for name in values.keys() - Settings.model_fields.keys():
        setattr(settings, name, values.pop(name))
    return settings(**values)


def rows_in_use(overlay: Overlay) -> dict[str, int]:
    """The row of every label that an overlay answers, by id, in the order of the rows."""
    return {overlay.added.ids[row]: overlay.base + row for row in np.flatnonzero(overlay.rows.in_use_M).tolist()}
