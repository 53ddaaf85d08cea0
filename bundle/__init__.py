"""The contract between trainer, index and service: a directory that describes itself (FORMAT.md)."""

from bundle.augment import Augmentation
from bundle.bundle import Bundle, read_manifest, verify_files
from bundle.errors import (
    BundleCorruptError,
    BundleError,
    BundleExistsError,
    BundleInvariantError,
    BundleVersionError,
    DisplayError,
    FeatureError,
    FixedLabelsError,
    InputError,
    LabelLogCorruptError,
    LabelLogError,
    LabelLogVersionError,
    TowerError,
)
from bundle.features import EXPECTS, FeatureReader, Features, Inputs
from bundle.frequency import BUCKET_NAMES, Buckets, log_frequencies
from bundle.label_log import Hide, LabelChanges, LabelLog, LabelRecord, Position, Restore, Tail, Upsert, replay
from bundle.labels import Labels
from bundle.manifest import (
    SCHEMA_VERSION,
    BiasRemoval,
    CurvePoint,
    Feature,
    FileRecord,
    Interval,
    Loss,
    Manifest,
)
from bundle.proposal import Proposal
from bundle.store import atomic_directory, refuse_existing, remove_stale, replace_file, sha256_of
from bundle.text import hash_token, tokenize
from bundle.tower import Tower
from bundle.vocabulary import OUT_OF_VOCABULARY, Vocabulary

__all__ = [
    "BUCKET_NAMES",
    "EXPECTS",
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
    "CurvePoint",
    "DisplayError",
    "Feature",
    "FeatureError",
    "FeatureReader",
    "Features",
    "FileRecord",
    "FixedLabelsError",
    "Hide",
    "InputError",
    "Inputs",
    "Interval",
    "LabelChanges",
    "LabelLog",
    "LabelLogCorruptError",
    "LabelLogError",
    "LabelLogVersionError",
    "LabelRecord",
    "Labels",
    "Loss",
    "Manifest",
    "Position",
    "Proposal",
    "Restore",
    "Tail",
    "Tower",
    "TowerError",
    "Upsert",
    "Vocabulary",
    "atomic_directory",
    "hash_token",
    "log_frequencies",
    "read_manifest",
    "refuse_existing",
    "remove_stale",
    "replace_file",
    "replay",
    "sha256_of",
    "tokenize",
    "verify_files",
]
