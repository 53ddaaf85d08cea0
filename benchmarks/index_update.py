"""What an update of a release costs beside a build, for 1 % of the labels changed, and what both recall.

    python -m benchmarks.index_update                    # 100,000, 300,000 and 1,000,000 labels
    python -m benchmarks.index_update --labels 3000000

Data: as of index_recall. Half a per cent of the labels go, a quarter are embedded anew, half a per cent come; all three
lie around the same centres. Seconds are the clock's, whole commands: the bundle read and verified, recall measured,
every file written. Shares are of the update, by what it says it is doing.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.index_recall import synthetic_bundle
from longtail.bundle import Bundle, log_frequencies
from longtail.index import ReleaseManifest, Releases, build, update

SPEC = "ivf_flat"
PARTS = {"exact": "exact answers", "fill": "fill", "recall": "measure", "write": "write"}
"""By the first word of what a build says; other words go on with the part before."""


def main() -> None:
    """Print a row for each number of labels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    print(f"\n{SPEC}; 1 % of the labels changed\n")
    print(
        "| labels | build s | update s | times | lowest recall, build | update | imbalance | updated | of the update |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    for labels in parser.parse_args().labels:
        with tempfile.TemporaryDirectory() as folder:
            print(row(labels, Path(folder)), flush=True)


def row(labels: int, folder: Path) -> str:
    """Build, change, build again and update; the figures of both."""
    before = synthetic_bundle(labels).write(folder / "before")
    after = changed(before, synthetic_bundle(labels, seed=1)).write(folder / "after")
    build(before, folder / "releases", spec=SPEC, name="before")
    seconds, rebuilt, _ = timed(
        lambda tell: build(after, folder / "releases", spec=SPEC, name="rebuilt", progress=tell)
    )
    quick, updated, parts = timed(
        lambda tell: update(after, folder / "releases", source="before", name="updated", progress=tell)
    )
    cells = Releases(folder / "releases").open("updated").manifest.partition
    assert cells is not None
    recalls = [min(at.recall for at in manifest.recall) for manifest in (rebuilt, updated)]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in parts.items())
    return (
        f"| {labels:,} | {seconds:.1f} | {quick:.1f} | {seconds / quick:.1f} | {recalls[0]:.4f} | {recalls[1]:.4f} | "
        f"{cells.imbalance_trained:.2f} | {cells.imbalance:.2f} | {shares} |"
    )


def changed(bundle: Bundle, other: Bundle) -> Bundle:
    """The bundle after a day: some labels gone, some with the embeddings of `other`, some new."""
    labels = len(bundle.embeddings)
    gone, moved, added = labels // 200, labels // 400, labels // 200
    rng = np.random.default_rng(2)
    kept = np.sort(rng.permutation(labels)[gone:])
    at = np.concatenate([kept, rng.integers(0, labels, added)])
    embeddings = np.asarray(bundle.embeddings)[at]
    # What moves or comes lies where catalogues have labels: near another one.
    noise = np.asarray(other.embeddings)[: moved + added] * np.float32(0.3)
    anew = np.concatenate([rng.choice(len(kept), moved, replace=False), len(kept) + np.arange(added)])
    embeddings[anew] = np.asarray(bundle.embeddings)[rng.integers(0, labels, moved + added)] + noise
    embeddings[anew] /= np.linalg.norm(embeddings[anew], axis=1, keepdims=True)
    source = bundle.labels
    ids = [*source.ids.take(pa.array(kept)).to_pylist(), *(f"new-{row}" for row in range(added))]
    counts = source.counts[at]
    counts[len(kept) :] = source.counts.min()  # as a merge gives them the rarest label's
    table = dataclasses.replace(
        source,
        ids=pa.array(ids),
        counts=counts,
        log_pn=log_frequencies(counts).astype(np.float32),
        buckets=bundle.manifest.buckets.assign(counts),
        display=source.display.take(pa.array(at)),
    )
    manifest = bundle.manifest.model_copy(update={"labels": len(at)})
    return dataclasses.replace(bundle, manifest=manifest, labels=table, embeddings=embeddings, path=None)


def timed(run: Callable[[Callable[[str], None]], ReleaseManifest]) -> tuple[float, ReleaseManifest, dict[str, float]]:
    """Seconds of a command, what it made, and the share of each part of it."""
    started = time.perf_counter()
    told = [("read", started)]
    manifest = run(lambda line: told.append((PARTS.get(line.split(" ")[0], told[-1][0]), time.perf_counter())))
    ended = time.perf_counter()
    shares: dict[str, float] = {}
    for (name, since), (_, until) in zip(told, [*told[1:], ("", ended)], strict=True):
        shares[name] = shares.get(name, 0.0) + (until - since) / (ended - started)
    return ended - started, manifest, shares


if __name__ == "__main__":
    main()
