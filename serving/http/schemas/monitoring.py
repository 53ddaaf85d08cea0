"""The body and answer of /v1/feedback, and the answer of /v1/monitoring."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from longtail.serving.core.feedback import Event
from longtail.serving.core.queries import BucketName, features_json
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.bridge import Body, at_most, check_lengths
from longtail.serving.monitoring.records import IdKind, Restriction, Source
from longtail.serving.monitoring.verdict import Severity, Signal
from longtail.serving.settings import MOST_QUERIES, Settings


class FeedbackRequest(Body):
    """Body of POST /v1/feedback."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"events": [{"features": {"user_id": "42"}, "labels": ["50"]}]}]}
    )

    events: list[Event] = Field(min_length=1, max_length=MOST_QUERIES)

    def check_limits(self, settings: Settings) -> None:
        """Check the number of events, and features that are recorded."""
        at_most(len(self.events), settings.max_queries, "events", "events")
        check_lengths([event.features for event in self.events], "events.{}.features")
        for index, event in enumerate(self.events if settings.record_features else ()):
            length = 0 if event.features is None else len(features_json(event.features))
            if length > settings.max_features_bytes:
                raise InvalidRequestError(
                    f"expected features of at most {settings.max_features_bytes} bytes as JSON, as they are recorded "
                    f"(LONGTAIL_RECORD_FEATURES), received {length}",
                    field=f"events.{index}.features",
                )


class FeedbackAnswer(BaseModel):
    """Answer of POST /v1/feedback: the events are stored durably."""

    accepted: int
    unknown: int = Field(default=0, description="Labels of the events that the release of their answer does not know.")
    request_id: str


class Share(BaseModel):
    """Figures of one bucket."""

    count: int
    share: float | None
    coverage: float = Field(description="Share of the bucket's labels that were answered at all.")


class Recall(BaseModel):
    """Share of the chosen labels that were answered, with the exact 95 % interval."""

    positives: int
    hits: int
    value: float | None
    low: float | None
    high: float | None


class PromisedRecall(BaseModel):
    """Labels chosen that the evaluation promises recall for, at the λ and length of each answer."""

    positives: int
    hits: int
    promised: float | None = Field(description="Recall promised for these labels; null if there are none.")
    low: float | None = Field(description="Lower end of the evaluation's 95 % interval.")
    high: float | None


class Judged(BaseModel):
    """Answers that the release has a promise for, which the verdict judges, each at its own λ.

    Not those with `buckets`, `allow`, `filter`, `explore`, `at_least`, `mmr` or `max_per`, with another ω, prior or
    `exclude_history` than the default, or with another μ where λ + μ is not one dial; and not similar labels. From each
    answer the first labels count, up to the number of labels per query in the baseline.
    """

    queries: int
    labels: int
    shares: dict[BucketName, float | None]
    promised: dict[BucketName, float | None] = Field(
        description="Shares that calibration queries get at the same λ and in as many labels a query; null for none or "
        "without a baseline."
    )
    scores: list[int] = Field(
        description="Numbers of these labels, by the deciles of the calibration scores at the same λ."
    )
    recall: dict[Source, dict[BucketName | Literal["all"], PromisedRecall]]


class NamedIds(BaseModel):
    """Ids that the release should know."""

    senders: int = Field(description="Queries or events that named at least one id.")
    ids: int
    unknown: int
    share: float | None = Field(description="Share of unknown ids.")


class Drift(BaseModel):
    """Population stability index of judged answers; null for too few labels or without a baseline."""

    buckets: float | None
    scores: float | None


class Load(BaseModel):
    """Requests for labels."""

    count: int
    per_second: float
    p50_ms: float | None
    p99_ms: float | None
    shed: int
    errors: int


class DialBin(BaseModel):
    """Queries with one setting of a dial, rounded to 0.05; settings beyond −1 or 2 count in the bin at that end."""

    at: float
    queries: int


class RequestedDials(BaseModel):
    """Settings of λ, μ and ω in queries, ascending; unused settings are left out."""

    bias_removal: list[DialBin]
    popularity_weight: list[DialBin]
    cooccurrence: list[DialBin]


class Finding(BaseModel):
    """Result of the verdict for one signal, in one bucket or in all (null)."""

    signal: Signal
    bucket: BucketName | None
    severity: Severity = Field(
        description="`act`: twice or half the promise, or broken; `watch`: a quarter more or a fifth less; "
        "`unknown`: too few answers. Differences within chance count as steady."
    )
    window: Literal["5m", "1h", "24h"] | None = Field(
        description="Window that the signal was judged over; null: the finding is about the present."
    )
    observed: float | None
    expected: float | None
    low: float | None = Field(description="Lower end of the 99.9 % interval of the observed value.")
    high: float | None
    sentence: str
    enough: int | None = Field(description="Queries needed to judge an `unknown` signal.")
    look_at: str | None = Field(description="Where to look for the cause of `watch` and `act`.")


class Verdict(BaseModel):
    """Verdict over all signals."""

    severity: Severity = Field(description="Severity of the worst finding.")
    headline: str
    findings: list[Finding] = Field(description="Findings of signals that are not steady, worst first.")


class Window(BaseModel):
    """Figures of the release in service over a time window."""

    seconds: int
    queries: int
    bias_removal: float | None = Field(description="Mean λ.")
    popularity_weight: float | None = Field(description="Mean μ, which requests call `popularity`.")
    cooccurrence: float | None = Field(description="Mean ω.")
    dials: RequestedDials
    restricted: dict[Restriction | Literal["queries"], int] = Field(
        description="Queries with `buckets`, `allow` or `filter` (`queries`), and by each of these."
    )
    floored: dict[Literal["queries", "unmet"], int] = Field(
        description="Queries with `at_least`, and of these with a floor that the answer does not meet."
    )
    exposures: dict[BucketName, Share]
    coverage: float
    popularity: float | None = Field(description="Mean training pairs of the answered labels.")
    judged: Judged
    ids: dict[IdKind, NamedIds] = Field(
        description="Ids in features of kind `id` or `bag`, in histories, and in feedback."
    )
    psi: Drift
    recall: dict[Source, dict[BucketName | Literal["all"], Recall]]
    dropped: int = Field(description="Events of answers and label changes that were not stored.")
    requests: Load


class MonitoringAnswer(BaseModel):
    """Answer of GET /v1/monitoring."""

    release: str
    since: datetime = Field(description="First minute of the last day in which the release answered.")
    now: datetime
    verdict: Verdict
    baseline: dict[str, JsonValue] | None = Field(
        description="Answers to held-out queries: λ, μ (`popularity_weight`), k, the number of queries (`queries`), "
        "shares, coverage, popularity, scores. `evaluated` has, at each λ of the curve and the largest common k, the "
        "shares `now` and those of the evaluation (`shares`)."
    )
    windows: dict[Literal["5m", "1h", "24h"], Window]
    ids_before: dict[IdKind, NamedIds] = Field(
        description="`ids` over the rest of the last day, before the last hour of the release in service."
    )
    gini: float | None = Field(description="Gini coefficient of the labels' exposures of today and yesterday (UTC).")
    series: dict[str, JsonValue] = Field(description="Figures by minute, oldest first, over all releases.")
    labels: dict[Literal["added", "hidden", "available"], int]
    staged: str | None = Field(
        default=None, description="The staged release that gets shadow queries (GET /v1/release/staged); null: none."
    )
    request_id: str
