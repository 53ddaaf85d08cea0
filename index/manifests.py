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


class SearchParams(Record):
    """Settings that trade speed for recall, in FAISS's words."""

    nprobe: int = Field(default=1, ge=1)
    """Inverted lists that a query visits; 1 for an index without lists."""
    k_factor: int = Field(default=1, ge=1)
    """Candidates fetched per result and rescored exactly, for kinds that compress rows. `ivf_sq` and `ivf_fastscan`
    fetch candidates for at least a hundred results."""
    head: bool = False
    """Whether a query also visits the lists of the head, the labels that may score highest."""

    @property
    def words(self) -> str:
        """Describe the settings, such as `4 lists, 2 candidates a result`."""
        lists = "1 list" if self.nprobe == 1 else f"{self.nprobe} lists"
        head = " and the head" if self.head else ""
        return lists + head + (f", {self.k_factor} candidates a result" if self.k_factor > 1 else "")

    def maximum(self, other: SearchParams) -> SearchParams:
        """Return settings that find at least what either of two finds."""
        return SearchParams(
            nprobe=max(self.nprobe, other.nprobe),
            k_factor=max(self.k_factor, other.k_factor),
            head=self.head or other.head,
        )

    def increase_nprobe(self, factor: int) -> SearchParams:
        """Multiply the number of visited lists."""
        return self.model_copy(update={"nprobe": factor * self.nprobe})


class RecallAt(Record):
    """Share of the exact top k that the index returns, at one dial point."""

    bias_removal: float
    popularity: float = 0.0
    priors: dict[str, float] = Field(default={})
    """Weight of every prior."""
    recall: float = Field(ge=0, le=1)

    @property
    def coordinates(self) -> str:
        """Describe λ, μ unless it is 0, and the weights of the priors in words."""
        weights = [f"{name} = {weight:g}" for name, weight in self.priors.items() if weight]
        return ", ".join([dial_words(self.bias_removal, self.popularity), *weights])


class SearchParamsAt(RecallAt):
    """Least sufficient search parameters for k results at one dial point, and their recall."""

    k: int = Field(ge=1)
    params: SearchParams


class Trial(Record):
    """Measurement of one kind of index at one setting: recall, speed and size."""

    kind: Kind
    params: SearchParams
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


class FilteredParams(Record):
    """Search settings where a filter leaves only a share of the labels eligible."""

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
    """Measured recall of search under filters, and the settings it takes."""

    queries: int = Field(ge=1)
    params: list[FilteredParams]
    recall: list[FilteredRecall]
    """Recall measured with `params`."""

    def lowest(self) -> dict[float, float]:
        """Return the lowest recall at each selectivity, over all labels and every bucket."""
        return {
            params.selectivity: min(at.lowest for at in self.recall if at.selectivity == params.selectivity)
            for params in self.params
        }


class CollectionColumn(Record):
    """A display column that requests may filter by, stored as two fields of a collection."""

    name: str
    """Name of the display column."""
    field: str
    """Field with the column's values; where a label has no value, the content is arbitrary."""
    presence_field: str
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
    params: SearchParams
    """Parameters that suffice at every setting of the dials."""
    params_at: list[SearchParamsAt] = Field(default=[])
    """Least sufficient parameters at each dial point and depth; empty for an exact index and a Milvus collection."""
    recall_k: int = Field(ge=1)
    recall_queries: int = Field(ge=1)
    recall_floor: float
    bytes_per_label: float | None = None
    """Bytes of the FAISS file per label; None for a Milvus collection."""
    kinds: list[Trial] = Field(default=[])
    """The kinds that `auto` compared, at settings that suffice everywhere; empty where `auto` had no choice."""
    recall: list[RecallAt]
    """Recall against exact search on the bundle's calibration queries, with the settings of each dial point."""
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

    def sealed(self) -> Self:
        """Return a copy of the manifest with the checksum of its other fields."""
        content = self.model_dump_json(exclude={"checksum"}).encode()
        return self.model_copy(update={"checksum": hashlib.sha256(content).hexdigest()})
