"""Publish releases of small bundles."""

from __future__ import annotations

from pathlib import Path

from longtail.bundle import Bundle
from longtail.index import build, open_releases


def publish_bundle(bundle: Bundle, folder: Path, name: str = "only") -> Path:
    """Build and publish a release with a flat index; returns the directory of releases."""
    build(bundle.write(folder / "bundle"), folder / "releases", spec="flat", name=name)
    open_releases(folder / "releases").publish(name)
    return folder / "releases"
