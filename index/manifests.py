"""Define release.json as typed records; the file holds everything needed to open a release."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Literal, Self

from pydantic import Field

from longtail.bundle import FileRecord, Prior
from longtail.bundle.manifest import Record, dial_words
from longtail.bundle.registry import RegisteredVersion

SCHEMA_VERSION = 1

Kind = Literal["flat", "ivf_flat", "ivf_sq", "ivf_fastscan", "milvus_flat", "milvus_ivf_flat"]
Device = Literal["cpu", "gpu"]


class Effort(Record):
    """Search effort: the settings that trade speed for recall."""

    probes: int = Field(default=1, ge=1)
    """Inverted lists that a query visits (nprobe); 1 for an index without lists."""
    refine: int = Field(default=1, ge=1)
    """Candidates fetched per result and rescored exactly, for kinds that compress rows. `ivf_sq` and `ivf_fastscan`
    fetch candidates for at least a hundred results."""
    head: bool = False
    """Whether a query visits the lists of the head, the labels of largest reach, too."""

    @property
    def words(self) -> str:
        """Describe the effort, such as `4 probes, 2 candidates a result`."""
        probes = "1 probe" if self.probes == 1 else f"{self.probes} probes"
        head = " and the head" if self.head else ""
        return probes + head + (f", {self.refine} candidates a result" if self.refine > 1 else "")

    def harder(self, other: Effort) -> Effort:
        """Return the effort that finds at least what either effort finds."""
        return Effort(
            probes=max(self.probes, other.probes),
            refine=max(self.refine, other.refine),
            head=self.head or other.head,
        )


class RecallAt(Record):
    """Share of the exact top k that the index returns, at one λ, μ and weights of the priors."""

    bias_removal: float
    popularity: float = 0.0
    priors: dict[str, float] = Field(default={})
    """Weight of every prior."""
    recall: float = Field(ge=0, le=1)

    @property
    def where(self) -> str:
        """Describe λ, μ unless it is 0, and the weights of the priors in words."""
        weights = [f"{name} = {weight:g}" for name, weight in self.priors.items() if weight]
        return ", ".join([dial_words(self.bias_removal, self.popularity), *weights])


class EffortAt(RecallAt):
    """The least sufficient effort at one λ, μ and weights of the priors for k results, and its recall."""

    k: int = Field(ge=1)
    effort: Effort


class Trial(Record):
    """Measurement of one kind of index at one setting: recall, speed and size."""

    kind: Kind
    effort: Effort
    recall: list[RecallAt]
    queries_per_second: float | None
    """Speed. In `trials`: one batch of all calibration queries on every thread of the building machine. In `kinds`: per
    second of CPU time, one query at a time, alternating with other kinds; None if recall falls short."""
    bytes_per_label: float | None = None
    """Bytes of the index file per label; None in `trials`."""

    @property
    def lowest(self) -> RecallAt:
        """Return the recall at the λ, μ and weights where this setting recalls least."""
        return min(self.recall, key=lambda at: at.recall)


class FilteredEffort(Record):
    """Search effort where a filter leaves only a share of the labels eligible."""

    selectivity: float = Field(gt=0, le=1)
    """Share of the labels that are eligible."""
    boost: float = Field(default=1.0, ge=1)
    """Factor on the search depth that the selectivity alone would call for."""
    exact: bool = False
    """Whether every eligible label is scored instead of searching the index."""


class FilteredRecall(Record):
    """Share of the exact top k of some eligible labels that the index returns."""

    selectivity: float = Field(gt=0, le=1)
    selection: Literal["random", "near", "rare"]
    """Which labels: random ones, those nearest to one query, or the least popular."""
    k: int = Field(ge=1)
    """Results per query, at most the number of labels."""
    recall: float = Field(ge=0, le=1)
    buckets: dict[str, float]
    """Recall of each bucket's labels among the exact top k; buckets with too few of them are left out."""

    @property
    def lowest(self) -> float:
        """Return the lowest recall of all labels together and of each bucket."""
        return min([self.recall, *self.buckets.values()])


class FilteredSearch(Record):
    """Measured recall of search under filters, and the efforts that it takes."""

    queries: int = Field(ge=1)
    efforts: list[FilteredEffort]
    recall: list[FilteredRecall]
    """Recall measured with `efforts`."""

    def lowest(self) -> dict[float, float]:
        """Return the lowest recall at each selectivity, over all labels and every bucket."""
        return {
            effort.selectivity: min(at.lowest for at in self.recall if at.selectivity == effort.selectivity)
            for effort in self.efforts
        }


class CollectionColumn(Record):
    """A display column that requests may filter by, stored as two fields of a collection."""

    name: str
    """Name of the display column."""
    field: str
    """Field with the column's values; where a label has no value, the content is arbitrary."""
    known: str
    """Field that says whether a label has a value."""
    type: Literal["varchar", "array", "bool", "int64", "half", "float", "double"]
    """Type in which values are compared; `half` and `float` are stored as doubles."""


class CollectionRecord(Record):
    """The collection of a Milvus server that holds a release's rows."""

    name: str
    head: int = Field(ge=0)
    """Number of most frequent labels in the partition `head`, which is searched exactly; 0: no partitions."""
    lists: int = Field(ge=0)
    """Inverted lists of each segment of the partition `tail`; 0: every search is exact."""
    columns: list[CollectionColumn]
    server: str
    """Version of the Milvus server that built the collection."""


class ReleaseManifest(Record):
    """The whole of release.json: the bundle, the index, its measurements, and a checksum of every file."""

    schema_version: int = SCHEMA_VERSION
    name: str
    created_at: datetime
    bundle: str
    """The bundle's name."""
    bundle_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Checksum of bundle/manifest.json, which holds the sha256 of every other bundle file."""
    registered: RegisteredVersion | None = None
    """The MLflow registry version of the bundle, or of the bundle that new priors or a new forecast started from."""
    spec: str
    """The spec of the build: auto, flat, …"""
    kind: Kind
    """The kind of index that the spec led to for this catalogue."""
    labels: int = Field(ge=1)
    dim: int = Field(ge=1)
    """Coordinates of an augmented row [METHODS §6]."""
    priors: list[Prior] = Field(default=[])
    """Names and limits of the priors; `index/priors.npy` holds their values, float32 [L, P]."""
    factory: str | None
    """FAISS factory string of the index (metric inner product, ids are label rows); None for a Milvus collection."""
    head_lists: int = Field(default=0, ge=0)
    """Number of inverted lists of the head, the last ones."""
    collection: CollectionRecord | None = None
    """The Milvus collection with the rows; None if FAISS holds them."""
    effort: Effort
    """Effort that suffices at every place on the dials."""
    efforts: list[EffortAt] = Field(default=[])
    """Least effort that suffices at each place and depth; empty for an exact index and for a Milvus collection."""
    recall_k: int = Field(ge=1)
    recall_queries: int = Field(ge=1)
    recall_floor: float
    bytes_per_label: float | None = None
    """Bytes of the FAISS file per label; None for a Milvus collection."""
    kinds: list[Trial] = Field(default=[])
    """The kinds that `auto` compared, at settings that suffice everywhere; empty where `auto` had no choice."""
    recall: list[RecallAt]
    """Recall against exact search on the bundle's calibration queries, with the effort of each place."""
    trials: list[Trial]
    device: Device
    build_seconds: float
    faiss: str
    filtered: FilteredSearch | None = None
    """Measurements of search under filters; None for an exact index."""
    queries: int = Field(default=0, ge=0)
    """Rows of the index of known queries, a release in `queries/`; 0: none."""
    filterable: list[str] | None = None
    """Display columns that requests may filter by; None: the service decides by the columns' types."""
    files: dict[str, FileRecord]
    """Every file of index/ and queries/, by path below the release."""
    checksum: str = ""
    """sha256 of this manifest as JSON without this field, so that damage to release.json is noticed."""

    def expected_checksum(self) -> str:
        """Compute the `checksum` that the values of the other fields imply."""
        return hashlib.sha256(self.model_dump_json(exclude={"checksum"}).encode()).hexdigest()

    def sealed(self) -> Self:
        """Return a copy of the manifest with its checksum."""
        return self.model_copy(update={"checksum": self.expected_checksum()})
