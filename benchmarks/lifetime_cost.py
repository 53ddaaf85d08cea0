"""CPU of a request to a catalogue of dated labels, against the same catalogue without lifetimes.

    python -m benchmarks.lifetime_cost [--labels 1000000] [--rate 100]

Both answer from one index in this process, in turn. Ten lifetimes begin or end in every second of a clock that passes
with the requests, `rate` of them a second: no filter, one filter that recurs, or twenty in turn.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import typer

from longtail.bundle import Bundle
from longtail.index import IndexSpec, Releases, build
from longtail.serving.core import lifetimes
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import Query
from longtail.serving.core.retriever import Retriever
from tests.bundles import make_bundle

_NOW, _HORIZON = 1_800_000_000, 200_000


def main(labels: int = 1_000_000, dim: int = 16, spec: str = "ivf_flat", rate: int = 100, seconds: int = 8) -> None:
    """Print the ratio of the medians over pairs, and of the sums, which hold what a second costs once."""
    folder = Path(tempfile.gettempdir()) / "longtail" / f"dated-{labels}-{dim}-{spec}"
    if not folder.exists():
        bundle = make_bundle(labels=labels, dim=dim)
        display = pa.table({"group": pa.array(np.arange(labels) % 200)})
        manifest = bundle.manifest.model_copy(update={"display": ["group"]})
        replace(bundle, labels=replace(bundle.labels, display=display), manifest=manifest).write(folder / "bundle")
        build(folder / "bundle", folder / "releases", spec=IndexSpec(spec, recall_floor=0.0), name="plain")
    plain = load_release(Releases(folder / "releases"), "plain")
    filters = [{"group": {"in": [*range(first, first + 40)]}} for first in range(0, 160, 8)]
    for gone in (0.0, 0.01, 0.3):
        dated = _dated(plain, gone)
        for name, some in (("none", [{}]), ("one", filters[:1]), ("twenty", filters)):
            costs, most = _costs([plain, dated], some, rate, seconds)
            medians, sums = np.median(costs, axis=0), costs.sum(axis=0)
            print(
                f"{labels:,} labels, {gone:.0%} not available, filters {name}: {1e3 * medians[0]:.2f} ms → "
                f"{medians[1] / medians[0]:.3f} of it, in sum {sums[1] / sums[0]:.3f}; longest {1e3 * most:.1f} ms",
                flush=True,
            )


def _dated(plain: Retriever, gone: float) -> Retriever:
    """Create a retriever of the same index whose labels have lifetimes; a share of them has ended."""
    bundle, rng = plain.bundle, np.random.default_rng(0)
    begin = _NOW - rng.integers(1, _HORIZON, len(bundle.embeddings))
    until = _NOW + rng.integers(1, _HORIZON, len(begin))
    until = np.where(rng.random(len(begin)) < gone, begin + 1, until)
    display = bundle.labels.display
    for name, times in (("available_from", begin), ("available_until", until)):
        display = display.append_column(name, pa.array(times * 1_000_000, pa.timestamp("us")))
    dated: Bundle = replace(bundle, labels=replace(bundle.labels, display=display))
    searcher = plain.overlay._visible
    return Retriever(name="dated", created_at=plain.created_at, bundle=dated, searcher=searcher, encoder=plain.encoder)


def _costs(
    pair: list[Retriever], filters: list[dict[str, object]], rate: int, seconds: int
) -> tuple[np.ndarray, float]:
    costs, clock = np.zeros((rate * seconds, 2)), [float(_NOW)]
    lifetimes.now = lambda: clock[0]
    for at in range(-2 * len(filters), len(costs)):
        clock[0] += 1 / rate
        query = Query(features={"user_id": f"u{at % 20}"}, k=10, filter=filters[at % len(filters)])
        for which in (0, 1) if at % 2 else (1, 0):
            before = time.process_time()
            pair[which].retrieve([query])
            if at >= 0:
                costs[at, which] = time.process_time() - before
    return costs, float(costs[:, 1].max())


if __name__ == "__main__":
    typer.run(main)
