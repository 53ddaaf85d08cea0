"""Synthetic releases of any size, built once and kept, for benchmarks."""

from __future__ import annotations

from pathlib import Path

from longtail.index import IndexSpec, Releases, build
from tests.bundles import make_bundle


def synthetic_release(directory: Path, *, labels: int, dim: int, spec: str) -> Path:
    """A directory of releases whose CURRENT has so many labels; built below `directory` unless it is there."""
    name = f"{spec.replace(',', '-')}-{labels}x{dim}"
    root = directory / name
    if Releases(root / "releases").current() is None:
        make_bundle(labels=labels, dim=dim, users=1000).write(root / "bundle")
        # The vectors are random, which no approximate index can search well: speed is measured, not recall.
        build(root / "bundle", root / "releases", spec=IndexSpec(spec, recall_floor=0.0), name=name)
        Releases(root / "releases").publish(name)
    return root / "releases"
