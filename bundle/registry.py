"""Store bundles in MLflow's registry: a version of `models:/NAME` is a bundle, and an alias points at one version.

MLFLOW_TRACKING_URI or MLFLOW_REGISTRY_URI has the address of the registry. MLflow's client is imported on first use.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from longtail.bundle.errors import ObjectStoreError
from longtail.bundle.integrity import MANIFEST, read_manifest, verify_files
from longtail.bundle.manifest import Manifest, Record
from longtail.bundle.remote import copies_path, downloading
from longtail.bundle.store import atomic_directory, file_sha256
from longtail.extras import pip_install

_SCHEME = "models:/"
_URL_PATTERN = re.compile(r"models:/(?P<name>[^/@:]+)(/(?P<version>\d+)|@(?P<alias>[^/@]+))?")
_DIGITS = 12


class RegisteredVersion(Record):
    """A version of a registered model, and the run that created it."""

    name: str
    version: int
    run: str | None = None

    @property
    def source(self) -> str:
        """Return the URL of this version by number."""
        return f"{_SCHEME}{self.name}/{self.version}"


def is_registered(source: object) -> bool:
    """Return whether a source is in MLflow's registry: `models:/…`."""
    return isinstance(source, str) and source.startswith(_SCHEME)


def download_version(source: str, cache: Path | None = None) -> tuple[Path, RegisteredVersion]:
    """Get a verified local copy of a version's bundle, and the version; raises BundleError or ObjectStoreError.

    Args:
        source: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
    """
    record = _find_version(source)
    root = copies_path(record.source, cache)
    with downloading(root):
        if not any(root.glob(f"version/*/{MANIFEST}")):
            with atomic_directory(root / "version", replace=True) as working:
                with _mlflow(source) as mlflow:
                    mlflow.artifacts.download_artifacts(artifact_uri=record.source, dst_path=str(working))
                (folder,) = working.iterdir()
                verify_files(folder, read_manifest(folder).files)
    return next(root.glob(f"version/*/{MANIFEST}")).parent, _version(record)


def upload_version(bundle: Path, source: str) -> RegisteredVersion:
    """Verify a bundle, log it to a run, and register it as a version.

    The run is that of MLFLOW_RUN_ID, or the one that tracked the bundle's training, or a new one.

    Args:
        source: `models:/NAME`, created if missing, or `models:/NAME@ALIAS`, whose alias moves to the new version.

    Raises BundleError, or ObjectStoreError if no version was registered or the alias did not move.
    """
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest.files)
    parts = _URL_PATTERN.fullmatch(source)
    if parts is None or parts["version"]:
        raise ObjectStoreError(f"{source}: expected models:/NAME or models:/NAME@ALIAS to register a bundle")
    # Named by its content, so that a repeated upload finds the version of the first.
    folder, run_id = f"bundle-{file_sha256(bundle / MANIFEST)[:_DIGITS]}", _run(bundle)
    what = source if run_id is None else f"{source}, run {run_id} (MLFLOW_RUN_ID names another)"
    with _mlflow(what) as mlflow, ExitStack() as stack:
        client = mlflow.MlflowClient()
        # An existing run is not entered as a context, so that an error here cannot change its status.
        run = client.get_run(run_id) if run_id else stack.enter_context(mlflow.start_run(run_name=manifest.name))
        for name, value in _figures(manifest).items():
            client.log_metric(run.info.run_id, name, value)
        client.log_artifacts(run.info.run_id, str(bundle), folder)
        try:
            client.create_registered_model(parts["name"])
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        artifact = f"{run.info.artifact_uri}/{folder}"
        versions = client.search_model_versions(f"name = '{parts['name']}'")
        record = next((version for version in versions if version.source == artifact), None)
        record = record or client.create_model_version(parts["name"], artifact, run.info.run_id)
        if parts["alias"]:
            client.set_registered_model_alias(parts["name"], parts["alias"], record.version)
    return _version(record)


def _run(bundle: Path) -> str | None:
    """Get the run to which a bundle is logged; None: a new one."""
    if run_id := os.environ.get("MLFLOW_RUN_ID"):
        return run_id
    history = bundle / "history.json"
    run: str | None = json.loads(history.read_bytes()).get("runs", {}).get("mlflow") if history.is_file() else None
    return run


def _figures(manifest: Manifest) -> dict[str, float]:
    """Get the offline metrics at the default dials, under MLflow's names."""
    return {
        f"{manifest.bias_removal.curve_split}/{name}".replace("@", "_at_"): figure.value
        for name, figure in manifest.default_point.metrics.items()
    }


def _find_version(source: str) -> Any:
    """Get MLflow's record of a version."""
    parts = _URL_PATTERN.fullmatch(source)
    if parts is None or not parts[2]:
        raise ObjectStoreError(f"{source}: expected models:/NAME@ALIAS or models:/NAME/VERSION")
    with _mlflow(source) as mlflow:
        client = mlflow.MlflowClient()
        if parts["alias"]:
            return client.get_model_version_by_alias(parts["name"], parts["alias"])
        return client.get_model_version(parts["name"], parts["version"])


def _version(record: Any) -> RegisteredVersion:
    return RegisteredVersion(name=record.name, version=int(record.version), run=record.run_id or None)


@contextmanager
def _mlflow(source: str) -> Iterator[Any]:
    """Yield MLflow's package; its errors in the block become ObjectStoreError."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # otherwise every call is reported to the vendor
    try:
        import mlflow
    except ImportError as error:
        raise ObjectStoreError(f"{source}: expected the extra `track`, {pip_install('track')}: {error}") from error
    try:
        yield mlflow
    except mlflow.exceptions.MlflowException as error:
        raise ObjectStoreError(f"{source}: MLflow at {mlflow.get_tracking_uri()}: {error}") from error
