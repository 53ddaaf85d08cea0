"""Define the contract between trainer, index and service: a self-describing directory (FORMAT.md)."""

from longtail.bundle.augment import Augmentation
from longtail.bundle.bundle import Bundle
from longtail.bundle.dates import DatePart
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
from longtail.bundle.label_changes import (
    Hide,
    LabelChanges,
    LabelRecord,
    Patch,
    Restore,
    Upsert,
)
from longtail.bundle.labels import Labels
from longtail.bundle.manifest import (
    BONUS_BUCKETS,
    FEATURE_VALUE_TYPES,
    SCHEMA_VERSION,
    BiasRemoval,
    Bonus,
    BonusBucket,
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
from longtail.bundle.tower import OnnxTower, Tower
from longtail.bundle.vectors import ChosenTogether, TrainingFacts, bundle_from_vectors
from longtail.bundle.vocabulary import Vocabulary

__all__ = [
    "BONUS_BUCKETS",
    "BUCKET_NAMES",
    "FEATURE_VALUE_TYPES",
    "MAX_PRIORS",
    "SCHEMA_VERSION",
    "Augmentation",
    "BiasRemoval",
    "Bonus",
    "BonusBucket",
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
    "OnnxTower",
    "Patch",
    "Popularity",
    "Prior",
    "Priors",
    "Proposal",
    "Restore",
    "Tower",
    "TowerError",
    "TrainingFacts",
    "Upsert",
    "Vocabulary",
    "bundle_from_vectors",
    "log_frequencies",
]
