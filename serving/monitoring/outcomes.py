"""Every outcome of the service is recorded by one call, which counts it for /metrics and for GET /v1/monitoring.

| outcome | /metrics, by `Metrics` | GET /v1/monitoring, by `LiveFigures` |
|---|---|---|
| a request has ended | requests and seconds of its route | requests, errors and latency, of traffic |
| a preview has ended | previews, and nothing else | – |
| a request was turned away, the queue being full | shed | shed |
| a batch was answered | queries, λ, exposures, scores, arms, unknown ids | the same, labels |
| labels were chosen | positives and hits by bucket, by λ, by arm | positives and hits by bucket |
| an event was dropped | dropped | dropped |
| a release went into service | swaps, the release's name | the release's interval |

Prometheus has totals since the process began, of any window and of all replicas; the page has windows of this host,
through restarts, on a service that no Prometheus scrapes.
"""

from __future__ import annotations

from collections.abc import Mapping

from longtail.bundle.arrays import Int8
from longtail.serving.monitoring.baseline import Baseline, OfflineFigures
from longtail.serving.monitoring.live_figures import LiveFigures
from longtail.serving.monitoring.prometheus import Metrics
from longtail.serving.monitoring.records import AnsweredBatch, ChosenLabels
from longtail.serving.monitoring.workers import Seat, Workers

_TRAFFIC_ROUTES = ("/v1/retrieve", "/v1/similar")


class Monitoring:
    """Both views of what one worker does. Thread-safe.

    What only one of them shows is counted there alone: `metrics.timeouts.inc()`.

    Args:
        seat: tells the other workers of this one, of which there are none if None.
    """

    def __init__(self, metrics: Metrics, figures: LiveFigures, seat: Seat | None = None) -> None:
        self.metrics = metrics
        self.figures = figures
        self.seat = seat or Seat(Workers(), 0)

    def count_request(self, route: str, status: int, seconds: float, *, preview: bool = False) -> None:
        """Count a request that has ended.

        Args:
            preview: nobody will see the answer: it is in no count and no latency but its own.
        """
        if preview:
            self.metrics.count_preview(status)
            return
        self.metrics.count_request(route, status, seconds)
        # Traffic are requests for labels that were not refused, as that takes no time.
        if route in _TRAFFIC_ROUTES and not 400 <= status < 500:
            self.figures.count_request(seconds, status)

    def count_shed(self) -> None:
        """Count a request that was turned away because a queue was full."""
        self.metrics.shed.inc()
        self.figures.count("shed")

    def count_answers(self, batch: AnsweredBatch, unknown: Mapping[str, int]) -> None:
        """Count a batch that was answered, and ids that its release does not have, by `exclude` and `allow`."""
        self.metrics.count_answers(batch, unknown, *self.figures.count_answers(batch))

    def count_choice(self, chosen: ChosenLabels) -> None:
        """Count labels chosen at once, of which the event is kept."""
        self.metrics.count_choice(chosen, *self.figures.count_choice(chosen))

    def count_dropped(self, events: int) -> None:
        """Count events that no client waited for and that could not be kept."""
        self.metrics.dropped.inc(events)
        self.figures.count("dropped", events)

    def begin_release(
        self, release: str, buckets_L: Int8, baseline: Baseline | None, offline: OfflineFigures | None = None
    ) -> None:
        """Count what is answered as this release's from now on; as `LiveFigures.begin_release`."""
        self.figures.begin_release(release, buckets_L, baseline, offline)
        self.metrics.begin_release(release)
