"""A day of a service as GET /v1/monitoring and GET /v1/release tell it: after a swap, the tail drifts."""

from __future__ import annotations

import copy
import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from longtail.serving.monitoring.offline import OfflineFigures
from longtail.serving.monitoring.verdict import Evidence, judge

NOW = datetime(2026, 3, 2, 14, 7, 30, tzinfo=UTC)
BUCKETS = ("head", "torso", "tail", "new")
KINDS = (*BUCKETS, "all")
OLD, NEW = "20260301T220000Z-movielens-100k", "20260302T094200Z-movielens-100k"
SWAPPED = NOW - timedelta(hours=4, minutes=25)
BASELINE = {"head": 0.8579, "torso": 0.1369, "tail": 0.0052, "new": 0.0}
# A curve from before there was `new`.
# λ: recall@20 (value, low, high) of all, head, torso, tail; exposure@20 of head, torso, tail
CURVE = {
    0.0: (.1835, .1624, .2077, .1531, .1258, .1831, .2915, .2385, .3613, .1778, .0666, .2858, .3763, .3710, .2527),
    0.2: (.2163, .1943, .2442, .2060, .1826, .2367, .2714, .2187, .3407, .1333, .0434, .2288, .5476, .3476, .1049),
    0.4: (.2397, .2149, .2695, .2403, .2098, .2731, .2714, .2142, .3403, .0889, .0217, .1704, .6886, .2735, .0379),
    0.5: (.2481, .2230, .2779, .2604, .2277, .2963, .2462, .1927, .3146, .0667, .0000, .1429, .7433, .2332, .0235),
    0.6: (.2428, .2164, .2741, .2675, .2329, .3066, .2111, .1620, .2811, .0222, .0000, .0642, .7889, .1969, .0142),
    0.8: (.2556, .2309, .2880, .2947, .2589, .3376, .1759, .1299, .2442, .0111, .0000, .0334, .8579, .1369, .0052),
    1.0: (.2556, .2322, .2867, .3033, .2696, .3441, .1457, .0983, .2040, .0000, .0000, .0000, .9046, .0934, .0020),
}  # fmt: skip
FILMS = (
    ("50", "Star Wars (1977)", ["Action", "Sci-Fi"], "head"), ("181", "Return of the Jedi (1983)", ["Action"], "head"),
    ("174", "Raiders of the Lost Ark (1981)", ["Action"], "head"), ("89", "Blade Runner (1982)", ["Sci-Fi"], "head"),
    ("135", "2001: A Space Odyssey (1968)", ["Drama", "Sci-Fi"], "head"), ("183", "Alien (1979)", ["Horror"], "head"),
    ("429", "Day the Earth Stood Still, The (1951)", ["Sci-Fi"], "torso"),
    ("657", "Manchurian Candidate, The (1962)", ["Thriller"], "torso"), ("488", "Sunset Blvd. (1950)", [], "torso"),
    ("1558", "Aparajito (1956)", ["Drama"], "tail"), ("1449", "Pather Panchali (1955)", ["Drama"], "tail"),
    ("1512", "World of Apu, The (Apur Sansar) (1959)", ["Drama"], "tail"),
)  # fmt: skip


def wilson(hits: int, positives: int) -> dict[str, float | int | None]:
    """A recall with its 95 % Wilson interval."""
    if not positives:
        return {"positives": 0, "hits": 0, "value": None, "low": None, "high": None}
    p, z = hits / positives, 1.96
    centre, spread = p + z * z / (2 * positives), z * math.sqrt(p * (1 - p) / positives + z * z / (4 * positives**2))
    scale = 1 + z * z / positives
    return {
        "positives": positives,
        "hits": hits,
        "value": p,
        "low": (centre - spread) / scale,
        "high": (centre + spread) / scale,
    }


def release() -> dict[str, Any]:
    """GET /v1/release."""

    def metrics(row: tuple[float, ...]) -> dict[str, Any]:
        names = ("recall@20", "recall@20/head", "recall@20/torso", "recall@20/tail")
        found = {name: dict(zip(("value", "low", "high"), row[3 * i : 3 * i + 3])) for i, name in enumerate(names)}  # noqa: B905
        shares = {
            f"exposure@20/{bucket}": {"value": row[12 + i], "low": None, "high": None}
            for i, bucket in enumerate(BUCKETS[:3])
        }
        return {**found, **shares, "coverage@20": {"value": 0.41, "low": None, "high": None}}

    return {
        "name": NEW,
        "created_at": "2026-03-02T09:41:12+00:00",
        "model": "movielens-100k",
        "labels": 1682,
        "dim": 64,
        "similarity": "dot",
        "temperature": 1.0,
        "loss": {"family": "softmax", "sampler": "in_batch", "weight": "unit"},
        "buckets": {"scheme": "quantile", "head_above": 54.0, "tail_upto": 10.0},
        "proposal": "label frequencies",
        "bias_removal": {
            "default": 0.8,
            "minimum": -1.0,
            "maximum": 2.0,
            "chosen_by": "valid recall@20",
            "curve_split": "test",
            "curve": [{"bias_removal": at, "popularity": 0.0, "metrics": metrics(row)} for at, row in CURVE.items()]
            + [{"bias_removal": 0.8, "popularity": 0.5, "metrics": metrics(CURVE[0.8])}],
        },
        "popularity": {"default": 0.0, "minimum": -1.0, "maximum": 2.0},
        "priors": [],
        "filterable": [],
        "query_features": [],
        "example": {"user_id": "196", "age": 49, "occupation": "writer", "history": ["242", "302", "377"]},
        "request_id": "r-release",
    }


def _shares(tail: float, new: float) -> dict[str, float]:
    torso = BASELINE["torso"] + 0.9 * (tail - BASELINE["tail"])
    return {"head": 1 - torso - tail - new, "torso": torso, "tail": tail, "new": new}


def _psi(shares: dict[str, float]) -> float:
    live = (shares["head"], shares["torso"], shares["tail"] + shares["new"])
    usual = (BASELINE["head"], BASELINE["torso"], BASELINE["tail"])
    return sum((p - q) * math.log(p / q) for p, q in zip(live, usual, strict=True))


def monitoring() -> dict[str, Any]:
    """GET /v1/monitoring: 1440 minutes, calm until the swap, then ever more tail; a short overload at noon."""
    rng = random.Random(7)
    empty: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    series: dict[str, Any] = {
        "step_seconds": 60, "share": {b: [] for b in BUCKETS},
        "recall": {"feedback": copy.deepcopy(empty), "shadow": copy.deepcopy(empty)},
        **{name: [] for name in ("at", "queries", "psi", "bias_removal", "release")},
        **{name: [] for name in ("requests_per_second", "p50_ms", "p99_ms", "shed")},
    }  # fmt: skip
    truth = {"head": 0.29, "torso": 0.19, "tail": 0.06, "new": 0.03, "all": 0.26}
    for minute in range(1440):
        at = (NOW - timedelta(minutes=1439 - minute)).replace(second=0)
        hours = (at - SWAPPED).total_seconds() / 3600
        tail = max(0.003, 0.0052 + max(0.0, hours) * 0.013 + rng.gauss(0, 0.0012))
        shares = _shares(tail, max(0.0, hours) * 0.0015)
        busy = 18 + 14 * math.sin((at.hour + at.minute / 60 - 8) / 24 * 2 * math.pi) + rng.gauss(0, 1)
        overload = at.hour == 12 and 10 <= at.minute < 22
        series["at"].append(at.isoformat())
        series["queries"].append(round(busy * 60))
        for bucket in BUCKETS:
            series["share"][bucket].append(shares[bucket])
        series["psi"].append(_psi(shares))
        series["bias_removal"].append(0.8 - max(0.0, hours) * 0.05 + rng.gauss(0, 0.01))
        series["requests_per_second"].append(busy * (2.2 if overload else 1))
        series["p50_ms"].append(3.1 + busy / 20 + rng.random() * 0.4 + 4 * overload)
        series["p99_ms"].append(9 + busy / 5 + rng.random() * 4 + 25 * overload)
        series["shed"].append(rng.randint(200, 420) if overload else 0)
        series["release"].append(NEW if hours >= 0 else OLD)
        for source, level, there in (("feedback", 1.0, 0.9), ("shadow", 0.85, 0.97)):
            for kind in KINDS:
                known = rng.random() < (there if kind not in ("tail", "new") else 0.4)
                value = level * truth[kind] * (1.15 if kind == "tail" and hours > 0 else 1) + rng.gauss(0, 0.05)
                series["recall"][source][kind].append(max(0.0, value) if known else None)
    windows = {
        "5m": _window(series, 300, {"head": 118, "torso": 21, "tail": 4, "new": 8}),
        "1h": _window(series, 3600, {"head": 1402, "torso": 263, "tail": 47, "new": 9}),
        "24h": _window(series, 86400, {"head": 31877, "torso": 5201, "tail": 612, "new": 31}),
    }
    baseline = {
        "bias_removal": 0.8,
        "popularity_weight": 0.0,
        "k": 20,
        "queries": 500,
        "coverage": {"head": 0.98, "torso": 0.71, "tail": 0.12, "new": 0.0},
        "shares": BASELINE,
        "popularity": 168.2,
        "scores": {"edges": [float(i) for i in range(9)], "shares": [0.1] * 10},
    }
    return {
        "release": NEW,
        "since": SWAPPED.isoformat(),
        "now": NOW.isoformat(),
        "baseline": baseline,
        "verdict": verdict(windows, baseline, added=17),
        "windows": windows,
        "gini": 0.834,
        "series": series,
        "releases": [
            {"name": OLD, "from": "2026-03-01T22:01:10+00:00", "until": SWAPPED.isoformat()},
            {"name": NEW, "from": SWAPPED.isoformat(), "until": None},
        ],
        "labels": {"added": 17, "hidden": 3},
        "request_id": "r-monitoring",
    }


def verdict(windows: dict[str, Any], baseline: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """What the service says of these windows."""
    return judge(
        Evidence(windows, baseline, OfflineFigures(), dict(zip(BUCKETS, (54, 400, 1228, 0), strict=True)), **more)
    )


def _window(series: dict[str, Any], seconds: int, positives: dict[str, int]) -> dict[str, Any]:
    rows = seconds // 60
    queries = sum(series["queries"][-rows:])
    share = {b: sum(series["share"][b][-rows:]) / rows for b in BUCKETS}
    coverage = {"head": 0.974, "torso": 0.702, "tail": 0.118, "new": 0.31}
    hits = {b: round(n * rate) for (b, n), rate in zip(positives.items(), (0.291, 0.188, 0.07, 0.12), strict=True)}
    positives, hits = {**positives, "all": sum(positives.values())}, {**hits, "all": sum(hits.values())}
    recall = {kind: wilson(hits[kind], positives[kind]) for kind in KINDS}
    shed = sum(series["shed"][-rows:])
    return {
        "seconds": seconds,
        "queries": queries,
        "bias_removal": sum(series["bias_removal"][-rows:]) / rows,
        "popularity_weight": 0.0,
        "exposures": {
            b: {
                "count": round(20 * queries * share[b]),
                "share": share[b],
                "coverage": coverage[b],
            }
            for b in BUCKETS
        },
        "dials": {
            "bias_removal": [
                {"at": 0.3, "queries": round(0.38 * queries)},
                {"at": 0.8, "queries": queries - round(0.38 * queries)},
            ],
            "popularity_weight": [{"at": 0.0, "queries": queries}],
        },
        "dropped": 0,
        "coverage": 0.412,
        "popularity": 151.4,
        "unrestricted": {"queries": queries, "labels": 20 * queries, "shares": share, "scores": [queries * 2] * 10},
        "psi": {"buckets": _psi(share), "scores": 0.043},
        "recall": {"feedback": recall, "shadow": {k: wilson(2 * hits[k], 2 * positives[k] + 30) for k in KINDS}},
        "requests": {
            "count": queries,
            "per_second": queries / seconds,
            "p50_ms": 4.32,
            "p99_ms": 14.8,
            "shed": shed,
            "errors": 2,
        },
    }


def fresh() -> dict[str, Any]:
    """GET /v1/monitoring of a service that nobody has asked anything, whose release has no baseline."""
    data = monitoring()
    nothing = {kind: wilson(0, 0) for kind in KINDS}
    for window in data["windows"].values():
        window |= {
            "queries": 0,
            "bias_removal": None,
            "popularity_weight": None,
            "coverage": 0.0,
            "popularity": None,
        }
        nobody = {"count": 0, "share": None, "coverage": 0.0}
        window |= {"exposures": dict.fromkeys(BUCKETS, nobody), "dials": {"bias_removal": [], "popularity_weight": []}}
        window |= {"psi": {"buckets": None, "scores": None}, "recall": {"feedback": nothing, "shadow": nothing}}
        window["requests"] |= {"count": 0, "per_second": 0.0, "p50_ms": None, "p99_ms": None, "shed": 0, "errors": 0}

    def emptied(tree: Any) -> Any:
        return {key: emptied(value) for key, value in tree.items()} if isinstance(tree, dict) else []

    data["series"] = {**emptied(data["series"]), "step_seconds": 60}
    data["verdict"] = verdict(data["windows"], None)
    return {
        **data,
        "baseline": None,
        "gini": None,
        "releases": data["releases"][1:],
        "labels": {"added": 0, "hidden": 0},
    }


def uncharted() -> dict[str, Any]:
    """GET /v1/release of a bundle that was never evaluated."""
    answer = release()
    answer["bias_removal"] |= {
        "curve": [],
        "curve_split": "none",
        "chosen_by": "the recipe, for want of validation data",
    }
    return answer


def ranked(bias_removal: float, k: int) -> list[dict[str, Any]]:
    """The films in the order of λ: the head gains 2 logits, the torso 1, for each unit of it."""
    gain = {"head": 2.0, "torso": 1.0, "tail": 0.0}
    scored = [
        {
            "id": id_,
            "score": 3 - 0.37 * (len(FILMS) - i) + gain[bucket] * bias_removal,
            "bucket": bucket,
            "display": {"title": title, "genres": genres},
        }
        for i, (id_, title, genres, bucket) in enumerate(FILMS)
    ]
    return sorted(scored, key=lambda label: -label["score"])[:k]


def retrieved(body: dict[str, Any]) -> dict[str, Any]:
    """POST /v1/retrieve."""
    results = [
        {
            "labels": ranked(query["bias_removal"] + query.get("popularity", 0.0), query["k"]),
            "bias_removal": query["bias_removal"],
            "popularity": query.get("popularity", 0.0),
            "unknown": {"exclude": 0, "allow": 0},
        }
        for query in body["queries"]
    ]
    return {"results": results, "release": NEW, "request_id": "r-retrieve"}
