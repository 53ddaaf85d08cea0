"""What head, torso and tail get, live: per-bucket figures of the answers of all workers, over windows and by minute.

`Live` is the whole of it: the service tells it what it answered and what was interacted with, and asks for a report.
Knows no HTTP. Inside: rings of counts in mapped files (ring, figures), answers and feedback in SQLite (schema,
feedback), the formulas (statistics), the report (windows, series, report) and its Prometheus form (collector).
"""

from longtail.serving.monitoring.live import Live
from longtail.serving.monitoring.records import Answered, Baseline, Event, Interaction, baseline_of, fingerprints

__all__ = ["Answered", "Baseline", "Event", "Interaction", "Live", "baseline_of", "fingerprints"]
