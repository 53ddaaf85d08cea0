"""What the service did and what every bucket got, for Prometheus and for GET /v1/monitoring.

`Monitoring` takes every outcome once (live_figures). It counts it in the multiprocess files of Prometheus (prometheus),
which adds up replicas, and for the page of this host in one ring of minutes per worker (ring) and one file of labels
shown per release, through restarts (live_figures). The report is made of them (report); one verdict
holds it against the baseline and the release's own evaluation (verdict, baseline).

Imports no web framework.
"""

from longtail.serving.monitoring.baseline import Baseline, OfflineFigures, measure_baseline
from longtail.serving.monitoring.live_figures import LiveFigures, Monitoring
from longtail.serving.monitoring.records import AnsweredBatch, ArmAnswer, ChosenLabels

__all__ = [
    "AnsweredBatch",
    "ArmAnswer",
    "Baseline",
    "ChosenLabels",
    "LiveFigures",
    "Monitoring",
    "OfflineFigures",
    "measure_baseline",
]
