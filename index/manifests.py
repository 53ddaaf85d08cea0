"""release.json as typed records: it says all that opening a release needs."""

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
    """Lists an IVF visits (nprobe); 1 without lists."""
    refine: int = Field(default=1, ge=1)
    """Candidates fetched per result and scored again exactly, for indexes that compress rows; of `ivf_sq` and
    `ivf_fastscan` for a hundred results at the least."""
    head: int | None = Field(default=None, ge=0)
    """Labels of the exact head that every query scores; the others are found by the index. None: the whole head."""

    @property
    def words(self) -> str:
        """Such as `4 probes, 316 of the head, 2 candidates a result`."""
        head = "" if self.head is None else f", {self.head:,} of the head"
        probes = "1 probe" if self.probes == 1 else f"{self.probes} probes"
        return f"{probes}{head}" + (f", {self.refine} candidates a result" if self.refine > 1 else "")

    def harder(self, other: Effort) -> Effort:
        """What finds as much as either."""
        heads = None if self.head is None or other.head is None else max(self.head, other.head)
        return Effort(probes=max(self.probes, other.probes), refine=max(self.refine, other.refine), head=heads)


class RecallAt(Record):
    """Share of the exact top k that the index returns, at one λ, μ and weights of the priors."""

    bias_removal: float
    popularity: float = 0.0
    priors: dict[str, float] = Field(default={})
    """Weight of every prior."""
    recall: float = Field(ge=0, le=1)

    @property
    def where(self) -> str:
        """The λ, the μ unless it is 0, and the weights, in words."""
        weights = [f"{name} = {weight:g}" for name, weight in self.priors.items()]
        return ", ".join([dial_words(self.bias_removal, self.popularity), *weights])


class EffortAt(RecallAt):
    """The least effort that suffices at one λ, μ and weights of the priors for the k best, and the recall it has."""

    k: int = Field(ge=1)
    effort: Effort


class Trial(Record):
    """One kind of index at one setting: what it recalls, how quick it is and what it takes."""

    kind: Kind
    head: int = Field(ge=0)
    """Labels in the exact head."""
    effort: Effort
    recall: list[RecallAt]
    queries_per_second: float | None
    """Speed. In `trials`: one batch of all calibration queries on every thread of the building machine. In `kinds`: per
    second of CPU time, one query at a time, alternating with other kinds; None if recall falls short."""
    bytes_per_label: float | None = None
    """Bytes of the index file per label; None in `trials`."""

    @property
    def lowest(self) -> RecallAt:
        """The λ, μ and weights that this setting serves worst."""
        return min(self.recall, key=lambda at: at.recall)


class FilteredEffort(Record):
    """How hard to look where only a share of the labels may be answered."""

    selectivity: float = Field(gt=0, le=1)
    """That share."""
    boost: float = Field(default=1.0, ge=1)
    """Times the depth that the share asks for by itself."""
    exact: bool = False
    """Whether every eligible label is scored instead."""


class FilteredRecall(Record):
    """Share of the exact top k of some labels that the index returns."""

    selectivity: float = Field(gt=0, le=1)
    selection: Literal["random", "near", "rare"]
    """Which labels: random ones, those nearest to one query, or the least popular."""
    k: int = Field(ge=1)
    """Results per query; as many as there are labels, if those are fewer."""
    recall: float = Field(ge=0, le=1)
    buckets: dict[str, float]
    """The same of each bucket's labels among the exact top k, where they are enough to tell."""

    @property
    def lowest(self) -> float:
        """Of all labels together and of each bucket's."""
        return min([self.recall, *self.buckets.values()])


class FilteredSearch(Record):
    """What was measured of search under filters, and what it takes."""

    queries: int = Field(ge=1)
    efforts: list[FilteredEffort]
    recall: list[FilteredRecall]
    """Measured with `efforts`."""

    def lowest(self) -> dict[float, float]:
        """The lowest recall measured at each selectivity, of all labels and of each bucket's."""
        return {
            effort.selectivity: min(at.lowest for at in self.recall if at.selectivity == effort.selectivity)
            for effort in self.efforts
        }


class CollectionColumn(Record):
    """A display column that requests may filter by, as two fields of a collection."""

    name: str
    """Of the column."""
    field: str
    """Of its values; of a label without one any."""
    known: str
    """Whether a label has one."""
    type: Literal["varchar", "array", "bool", "int64", "half", "float", "double"]
    """In which values are compared; `half` and `float` are kept as doubles."""


class CollectionRecord(Record):
    """The collection of a Milvus server that holds a release's rows."""

    name: str
    head: int = Field(ge=0)
    """Most frequent labels, in the partition `head`, which is searched whole; 0: there are no partitions."""
    lists: int = Field(ge=0)
    """Of each segment of the partition `tail`; 0: every search is exact."""
    columns: list[CollectionColumn]
    server: str
    """The version of the server that it was built on."""


class ReleaseManifest(Record):
    """The whole of release.json: which bundle, which index, what was measured of it, and what every file must be."""

    schema_version: int = SCHEMA_VERSION
    name: str
    created_at: datetime
    bundle: str
    """The bundle's name."""
    bundle_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Checksum of bundle/manifest.json, which holds the sha256 of every other bundle file."""
    registered: RegisteredVersion | None = None
    """The version of MLflow's registry that the bundle was taken from, or made of by new priors or a new forecast."""
    spec: str
    """The spec of the build: auto, flat, …"""
    kind: Kind
    """What the spec came to for this catalogue."""
    labels: int = Field(ge=1)
    dim: int = Field(ge=1)
    """Coordinates of an augmented row [METHODS §6]."""
    priors: list[Prior] = Field(default=[])
    """Their values stand in `priors.npy` beside the manifest, float32 [L, P]."""
    factory: str | None
    """The FAISS factory string that was built, metric inner product; its ids are label rows. None of a collection."""
    head: int = Field(ge=0)
    """Labels of the exact head, which every query is multiplied with."""
    collection: CollectionRecord | None = None
    """Where the rows are, if Milvus holds them."""
    effort: Effort
    """What suffices at every place on the dials, and under filters."""
    efforts: list[EffortAt] = Field(default=[])
    """What suffices at each place and depth; empty where no effort is less than `effort`."""
    recall_k: int = Field(ge=1)
    recall_queries: int = Field(ge=1)
    recall_floor: float
    bytes_per_label: float | None = None
    """Bytes of the FAISS file per label; None of a collection."""
    kinds: list[Trial] = Field(default=[])
    """What `auto` had to choose from, at settings that suffice everywhere; empty where it had no choice."""
    recall: list[RecallAt]
    """Measured with the effort of each place, against exact search, on the bundle's calibration queries."""
    trials: list[Trial]
    device: Device
    build_seconds: float
    faiss: str
    filtered: FilteredSearch | None = None
    """None of an exact index."""
    filterable: list[str] | None = None
    """Display columns that requests may filter by; None: whatever the service makes of them."""
    files: dict[str, FileRecord]
    """Every file of index/, by path below the release."""
    checksum: str = ""
    """sha256 of this manifest as JSON without this field, so that release.json vouches for itself."""

    def expected_checksum(self) -> str:
        """What `checksum` must be for the other fields' values."""
        return hashlib.sha256(self.model_dump_json(exclude={"checksum"}).encode()).hexdigest()

    def sealed(self) -> Self:
        """The same manifest with its checksum."""
        return self.model_copy(update={"checksum": self.expected_checksum()})
