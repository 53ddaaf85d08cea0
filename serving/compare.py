"""Compare the arms of an experiment (`longtail-serve experiments`), with bounds that hold at every look.

A usual 95 % interval is valid once, at a sample size fixed beforehand; if it is examined again and again, it sooner or
later excludes the truth. The intervals here are a **confidence sequence**: with 95 % probability all of them, at every
look, contain the truth.

**Estimate.** A unit (a user) of an arm has n answers with h hits, which are chosen labels that the answer held. The
rate is p̂ = Σh / Σn, and p̂ − p = S / N with S = Σ (h − p·n), N = Σn. Answers of the same unit are dependent, units are
independent: V = Σ (h − p̂·n)² over units estimates the variance of S. For two arms, p̂₁ − p̂₀ − δ = M / H with
H = N₁N₀ / (N₁ + N₀), M = S₁·N₀/(N₁ + N₀) − S₀·N₁/(N₁ + N₀), and V = V₁·(N₀/(N₁ + N₀))² + V₀·(N₁/(N₁ + N₀))².

**Boundary.** M is a sum over many independent units, like a Brownian motion at time V [Waudby-Smith, Arbour, Sinha,
Kennedy, Ramdas 2021, "Time-uniform central limit theory and asymptotic confidence sequences"], which passes
√(2 (V + ρ) log(√((V + ρ)/ρ) / 2α + 1)) at any time with a probability of at most α: the one-sided normal mixture, in
closed form [Howard, Ramdas, McAuliffe, Sekhon 2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences"].
Each of the two bounds gets half of the error. ρ sets the V at which the interval is narrowest relative to √V.

**Units return**, so M is not a random walk: later contributions of a unit resemble its earlier ones. This makes
crossings rarer: for s < t, Cov(M_s, M_t) = V_s + Cov(M_s, M_t − M_s) ≥ V_s, and of two Gaussian processes with equal
variances the one with larger covariances crosses a boundary less often [Slepian 1962]. Units whose later behaviour is
opposite to their earlier behaviour violate this assumption.

Legend: `U` units of an arm, `4` head, torso, tail and new.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Float64
from longtail.bundle.report_table import ReportTable
from longtail.index import open_releases
from longtail.index.release.releases import EXPERIMENTS_FILE
from longtail.serving.core.experiments import Experiment, ExperimentsError, parse_experiments
from longtail.serving.events.folder import kept_since
from longtail.serving.events.reader import open_events

ALPHA = 0.05
_RHO = 64.0
"""ρ in squared hits: the interval is tightest at some hundreds of hits in an arm."""
SRM_ALPHA = 0.001
"""Error probability of the check for a sample ratio mismatch, low because every alarm costs an investigation."""
_CONCENTRATION = 100.0
"""Concentration of the Dirichlet prior around the shares, for deviations of some percentage points."""
_COUNTS = ("answers", *(f"{kind}_{bucket}" for kind in ("shown", "chosen", "hits") for bucket in range(4)))
_EXPOSURES, _CHOICES, _HITS = (slice(first, first + 4) for first in (1, 5, 9))
_UNITS = f"""
WITH answered AS (SELECT * FROM answers WHERE run = $run AND time >= to_timestamp($since)),
shown AS (SELECT arm, unit, unnest(buckets) AS bucket FROM answered),
chosen AS (
    SELECT * FROM (SELECT DISTINCT ON (answer, label) * FROM choices WHERE run = $run ORDER BY time)
    WHERE time >= to_timestamp($since)
),
counts AS (
    SELECT arm, unit, 'answers' AS name, count(*) AS found FROM answered GROUP BY ALL
    UNION ALL SELECT arm, unit, 'shown_' || bucket, count(*) FROM shown GROUP BY ALL
    UNION ALL SELECT arm, unit, 'chosen_' || bucket, count(*) FROM chosen GROUP BY ALL
    UNION ALL SELECT arm, unit, 'hits_' || bucket, count(*) FROM chosen WHERE position IS NOT NULL GROUP BY ALL
)
SELECT arm, unit, {", ".join(f"coalesce(sum(found) FILTER (name = '{name}'), 0)" for name in _COUNTS)}
FROM counts GROUP BY arm, unit ORDER BY arm, unit
"""
"""Query for the units of every arm. A label that was both clicked and bought counts as one chosen label."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Hits and trials of every unit of an arm, float64 [U]; a trial is an answer or a chosen label."""

    hits_U: Float64
    trials_U: Float64

    @property
    def trials(self) -> float:
        """Return the number of trials over all units."""
        return float(self.trials_U.sum())

    @property
    def value(self) -> float | None:
        """Return hits per trial; None without trials."""
        return float(self.hits_U.sum()) / self.trials if self.trials else None

    @property
    def variance(self) -> float:
        """Estimate V, the variance of hits minus expected hits."""
        residuals_U = self.hits_U - (self.value or 0.0) * self.trials_U
        return float(residuals_U @ residuals_U)


Interval = dict[str, Any]
"""A figure, its bounds at every look, and whether they exclude 0: `value`, `low`, `high`, `real`."""


def boundary(variance: float, alpha: float = ALPHA) -> float:
    """Compute the deviation of a sum that `alpha` of all runs ever exceed."""
    return math.sqrt(2 * (variance + _RHO) * math.log(math.sqrt((variance + _RHO) / _RHO) / alpha + 1))


def rate_interval(rate: Rate, *, highest: float = math.inf) -> Interval | None:
    """Compute a rate, from 0 to `highest`, with its bounds; None without trials."""
    value = rate.value
    if value is None:
        return None
    reach = boundary(rate.variance) / rate.trials
    return _interval(max(0.0, value - reach), value, min(highest, value + reach))


def difference_interval(arm: Rate, control: Rate, *, alpha: float = ALPHA) -> Interval | None:
    """Compute the difference of two rates, with bounds; None while either has no trials.

    Args:
        alpha: probability that the bounds ever exclude the truth; divided by the number of arms compared with one
            control.
    """
    if arm.value is None or control.value is None:
        return None
    trials = arm.trials + control.trials
    of_control, of_arm = control.trials / trials, arm.trials / trials
    variance = arm.variance * of_control**2 + control.variance * of_arm**2
    reach = boundary(variance, alpha) / (arm.trials * of_control)
    value = arm.value - control.value
    return _interval(value - reach, value, value + reach)


def _interval(low: float, value: float, high: float) -> Interval:
    return {"value": value, "low": low, "high": high, "real": low > 0 or high < 0}


def sample_ratio_evidence(units: Sequence[int], shares: Sequence[float]) -> float:
    """Compute the evidence against an assignment by these shares.

    The result is an e-value: if the units were assigned by the shares, it ever reaches 1/α with probability at most α.
    It is the Bayes factor of a multinomial with a Dirichlet prior around the shares against the shares themselves
    [Lindon, Malek 2022, "Anytime-valid inference for multinomial count data"]. Units in an arm with share 0 are
    infinite evidence.
    """
    if any(count and not share for count, share in zip(units, shares, strict=True)):
        return math.inf
    pairs = [(count, share) for count, share in zip(units, shares, strict=True) if share]
    prior = _CONCENTRATION * len(pairs)
    log_factor = math.lgamma(prior) - math.lgamma(prior + sum(units))
    for count, share in pairs:
        log_factor += math.lgamma(prior * share + count) - math.lgamma(prior * share) - count * math.log(share)
    # exp(710) overflows a float.
    return math.exp(log_factor) if log_factor < 700 else math.inf


def read_experiment(releases: str | Path) -> Experiment | None:
    """Read the running experiment; raises ExperimentsError if the file is missing or wrong."""
    path = open_releases(releases).local_copy(EXPERIMENTS_FILE)
    try:
        return parse_experiments(path.read_bytes())
    except OSError as error:
        raise ExperimentsError(f"{path}: expected a file of experiments, found none: {error.strerror}") from None
    except ExperimentsError as error:
        raise ExperimentsError(f"{path}: {error.message}") from None


def compare(experiment: Experiment, folder: Path, window: tuple[float, float]) -> dict[str, Any]:
    """Compare the arms of an experiment by answers and choices.

    Args:
        window: from and up to when, in seconds since 1970; what is not kept whole is cut off at its beginning.

    Returns:
        The report, as JSON.

    Raises:
        StateError: events that cannot be read.
    """
    # Before `oldest` events were deleted, and an answer without its choices would count as a failure.
    oldest, (since, until) = kept_since(folder), window
    cut, since = oldest > since, max(oldest, since)
    with open_events(folder, since, until) as connection:
        units = connection.sql(_UNITS, params={"run": experiment.run, "since": since}).to_arrow_table()
    units = units.rename_columns(["arm", "unit", *_COUNTS])
    arm_of_unit = units["arm"].to_numpy(zero_copy_only=False)
    counted = np.stack([units[name].to_numpy() for name in _COUNTS]).astype(np.float64)
    counts = {name: counted[:, np.flatnonzero(arm_of_unit == name)] for name in experiment.arms}
    rates = {name: Rate(of_arm[_HITS].sum(axis=0), of_arm[0]) for name, of_arm in counts.items()}
    unit_counts = {name: int((of_arm[0] > 0).sum()) for name, of_arm in counts.items()}
    control, *others = experiment.arms
    evidence = sample_ratio_evidence([*unit_counts.values()], [arm.share for arm in experiment.arms.values()])
    return {
        "run": experiment.run,
        "since": format_seconds(since) if since else None,
        "until": format_seconds(until),
        "cut": cut,
        "confidence": 1 - ALPHA,
        "arms": [
            {
                "name": name,
                "share": arm.share,
                "release": arm.release,
                "settings": arm.json_settings,
                "units": unit_counts[name],
                **_figures(counts[name]),
                "hits_per_answer": rate_interval(rates[name]),
                "difference": None
                if name == control
                else difference_interval(rates[name], rates[control], alpha=ALPHA / len(others)),
            }
            for name, arm in experiment.arms.items()
        ],
        "sample_ratio": {"evidence": min(evidence, 1e300), "mismatch": evidence >= 1 / SRM_ALPHA},
    }


def _figures(counts: Float64) -> dict[str, Any]:
    sums = counts.sum(axis=1).astype(int)
    exposures = sums[_EXPOSURES].tolist()
    recall = {name: Rate(counts[9 + bucket], counts[5 + bucket]) for bucket, name in enumerate(BUCKET_NAMES)}
    recall["all"] = Rate(counts[_HITS].sum(axis=0), counts[_CHOICES].sum(axis=0))
    return {
        "answers": int(sums[0]),
        "chosen": int(sums[_CHOICES].sum()),
        "hits": int(sums[_HITS].sum()),
        "exposures": {
            name: {"count": count, "share": count / sum(exposures) if any(exposures) else None}
            for name, count in zip(BUCKET_NAMES, exposures, strict=True)
        },
        "recall": {name: rate_interval(rate, highest=1.0) for name, rate in recall.items()},
    }


def format_seconds(seconds: float) -> str:
    """Format seconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


_COLUMNS = ("arm", "share", "units", "answers", *BUCKET_NAMES, "hits/answer", "recall@k", "difference", "")


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Write a report for people, line by line."""
    yield f"{report['run']}, from {report['since'] or 'its beginning'} to {report['until']}"
    yield from ReportTable(_COLUMNS, [*map(_row, report["arms"])]).lines()
    ratio = report["sample_ratio"]
    if ratio["mismatch"]:
        yield f"sample ratio: units are not divided by the shares (evidence {ratio['evidence']:.3g}): do not trust the"
        yield "comparison before you know why"
    else:
        yield f"sample ratio: as the shares say (evidence {ratio['evidence']:.3g}, an alarm from 1000 on)"
    yield f"in brackets: bounds that hold at every look since the run began, with {report['confidence']:.0%}"
    yield "real: the bounds of the difference leave out 0; not yet: they hold it"
    if report["cut"]:
        yield f"events from before {report['since']} are not kept: of a run that began before, this is one look"


def _row(arm: Mapping[str, Any]) -> tuple[str, ...]:
    difference = arm["difference"]
    return (
        arm["name"],
        f"{arm['share']:g}",
        str(arm["units"]),
        str(arm["answers"]),
        *("–" if (share := it["share"]) is None else f"{share:.1%}" for it in arm["exposures"].values()),
        format_bounds(arm["hits_per_answer"]),
        format_bounds(arm["recall"]["all"]),
        "" if difference is None else format_bounds(difference, "+"),
        "" if difference is None else "real" if difference["real"] else "not yet",
    )


def format_bounds(figure: Mapping[str, Any] | None, sign: str = "") -> str:
    """Format a figure with its bounds; – for None."""
    if figure is None:
        return "–"
    value, low, high = (format(figure[name], f"{sign}.4f") for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
