"""What the service did and what every bucket got: for Prometheus, and by bucket over windows and by minute.

`Monitoring` takes every outcome once (outcomes) and counts it as Prometheus series (prometheus, collector) and as
figures of all workers that outlive the process (live_figures). Those stand in rings of counts in mapped files
(ring, release_figures, latency_bins), each release's beside its baseline (baseline), in a file of which release served
when (release_history), and with answers and feedback in SQLite (database, feedback_store, feedback_reader); the
report is made of them (report, windows, series). What an operator should know before any figure, worst first, is its
verdict: findings on every signal (verdict, drift, findings), held against the baseline and the release's own
evaluation (offline).

Imports no web framework.
"""

from longtail.serving.monitoring.baseline import Baseline, measure_baseline
from longtail.serving.monitoring.feedback_reader import FeedbackReader, FeedbackRow, feedback_of
from longtail.serving.monitoring.live_figures import LiveFigures
from longtail.serving.monitoring.offline import OfflineFigures
from longtail.serving.monitoring.outcomes import Monitoring
from longtail.serving.monitoring.records import (
    AnsweredBatch,
    AnswerFeedback,
    ArmAnswer,
    ShadowPair,
)

__all__ = [
    "AnswerFeedback",
    "AnsweredBatch",
    "ArmAnswer",
    "Baseline",
    "FeedbackReader",
    "FeedbackRow",
    "LiveFigures",
    "Monitoring",
    "OfflineFigures",
    "ShadowPair",
    "feedback_of",
    "measure_baseline",
]
