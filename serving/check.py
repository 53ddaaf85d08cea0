"""Check whether and how fast this machine serves a release."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.bundle import PROPOSAL
from longtail.bundle.manifest import dial_words
from longtail.index import open_releases
from longtail.index.release.release import RELEASE_MANIFEST
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.errors import UnservableReleaseError

_QUERIES = 200
_K = 20


def check_release(path: Path) -> Iterator[str]:
    """Verify, load and query a release; yields passed checks.

    Raises:
        BundleError, UnservableReleaseError, OSError, LongtailIndexError: the first check that fails.
    """
    if not (path / RELEASE_MANIFEST).is_file() and (names := open_releases(path).names()):
        raise UnservableReleaseError(f"{path}: expected one release, found a directory of some: use {path / names[-1]}")
    started = perf_counter()
    retriever = load_release(open_releases(path.resolve().parent), path.resolve().name)
    manifest = retriever.manifest
    yield f"intact: every file of {retriever.name} is what was written, {perf_counter() - started:.1f} s"
    yield f"model: {manifest.name}, {manifest.labels:,} labels, d = {manifest.dim}, {manifest.similarity}"
    dial = manifest.bias_removal
    k = min(_K, manifest.labels)
    example = retriever.example
    dials = [(value, 0.0) for value in sorted({dial.minimum, dial.default, dial.maximum})]
    if manifest.kappa_popularity is not None or PROPOSAL in manifest.files:
        prior = manifest.popularity
        weights = {prior.minimum, prior.default, prior.maximum} - {0.0}
        dials += [(dial.default, weight) for weight in sorted(weights)]
    for bias_removal, popularity in dials:
        query = RetrieveQuery(features=example, k=k, bias_removal=bias_removal, popularity=popularity)
        retrieval = retriever.retrieve([query])
        buckets = np.bincount(retrieval.buckets_N, minlength=len(BUCKET_NAMES))
        counts = ", ".join(f"{count} {name}" for name, count in zip(BUCKET_NAMES, buckets.tolist(), strict=True))
        yield f"answers at {dial_words(bias_removal, popularity)}: {len(retrieval.rows_N)} labels, {counts}"
    durations = []
    for _ in range(_QUERIES):
        query_start = perf_counter()
        retriever.retrieve([RetrieveQuery(features=example, k=k)])
        durations.append(perf_counter() - query_start)
    p50, p99 = np.quantile(durations, [0.5, 0.99]) * 1e3
    yield f"one query after the other: p50 {p50:.2f} ms, p99 {p99:.2f} ms"
    yield f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB at most, mapped files among it"
    if retriever.promises is None:
        yield "baseline: none, so drift will not be measured"
    else:
        baseline = retriever.promises.default
        shares = ", ".join(f"{name} {share:.1%}" for name, share in zip(BUCKET_NAMES, baseline.shares, strict=True))
        yield (
            f"baseline at {dial_words(baseline.bias_removal, baseline.popularity_weight)}, k = {baseline.k}: {shares}"
        )
