"""Define the contract between trainer, index and service: a self-describing directory (FORMAT.md)."""

from longtail.bundle.augment import Augmentation
from longtail.bundle.bundle import Bundle
from longtail.bundle.dates import DATE_ROWS, MISSING_DATE, DatePart, date_rows, seconds_of
from longtail.bundle.errors import (
    BundleCorruptError,
    BundleError,
    BundleExistsError,
    BundleInvariantError,
    BundleVersionError,
    DisplayError,
    FeatureError,
    FixedLabelsError,
    InputError,
    TowerError,
)
from longtail.bundle.features import FeatureReader, Features, Inputs
from longtail.bundle.frequency import BUCKET_NAMES, Buckets, log_frequencies
from longtail.bundle.integrity import read_manifest, verify_files
from longtail.bundle.label_changes import (
    Hide,
    LabelChanges,
    LabelRecord,
    Patch,
    Restore,
    Upsert,
    needed,
    read_record,
    record_json,
    replay,
)
from longtail.bundle.labels import Labels
from longtail.bundle.manifest import (
    FEATURE_VALUE_TYPES,
    SCHEMA_VERSION,
    BiasRemoval,
    CurvePoint,
    Feature,
    FeatureKind,
    FileRecord,
    Interval,
    Loss,
    Manifest,
    Popularity,
)
from longtail.bundle.priors import MAX_PRIORS, Prior, Priors
from longtail.bundle.proposal import Proposal
from longtail.bundle.store import (
    atomic_directory,
    refuse_existing,
    remove_stale,
    replace_file,
    sha256_of,
    working_directory,
)
from longtail.bundle.tower import Tower, onnx_session
from longtail.bundle.values import bucket_rows
from longtail.bundle.vectors import ChosenTogether
from longtail.bundle.vocabulary import OUT_OF_VOCABULARY, Vocabulary, hash_token, tokenize

__all__ = [
    "BUCKET_NAMES",
    "DATE_ROWS",
    "FEATURE_VALUE_TYPES",
    "MAX_PRIORS",
    "MISSING_DATE",
    "OUT_OF_VOCABULARY",
    "SCHEMA_VERSION",
    "Augmentation",
    "BiasRemoval",
    "Buckets",
    "Bundle",
    "BundleCorruptError",
    "BundleError",
    "BundleExistsError",
    "BundleInvariantError",
    "BundleVersionError",
    "ChosenTogether",
    "CurvePoint",
    "DatePart",
    "DisplayError",
    "Feature",
    "FeatureError",
    "FeatureKind",
    "FeatureReader",
    "Features",
    "FileRecord",
    "FixedLabelsError",
    "Hide",
    "InputError",
    "Inputs",
    "Interval",
    "LabelChanges",
    "LabelRecord",
    "Labels",
    "Loss",
    "Manifest",
    "Patch",
    "Popularity",
    "Prior",
    "Priors",
    "Proposal",
    "Restore",
    "Tower",
    "TowerError",
    "Upsert",
    "Vocabulary",
    "atomic_directory",
    "bucket_rows",
    "date_rows",
    "hash_token",
    "log_frequencies",
    "needed",
    "onnx_session",
    "read_manifest",
    "read_record",
    "record_json",
    "refuse_existing",
    "remove_stale",
    "replace_file",
    "replay",
    "seconds_of",
    "sha256_of",
    "tokenize",
    "verify_files",
    "working_directory",
]
