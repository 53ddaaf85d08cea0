"""Describe a release as GET /v1/release does."""

from __future__ import annotations

import math
from typing import Any

from longtail.bundle import Priors
from longtail.bundle.conditions import operators
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.retriever import Retriever


def release_json(retriever: Retriever, *, curve: bool = False) -> dict[str, Any]:
    """Return `ReleaseAnswer` of the HTTP API, but for the request's id; what a query needs stands first.

    Args:
        curve: with the offline figures at every λ and μ, tens of kilobytes.
    """
    manifest, index, forecast = retriever.manifest, retriever.query_index, retriever.forecast
    dial = manifest.bias_removal.model_dump(exclude=None if curve else {"curve"})
    described = {"labels", "dim", "similarity", "temperature", "loss", "popularity", "buckets"}
    together = manifest.cooccurrence
    return {
        "name": retriever.name,
        "created_at": retriever.created_at,
        "model": manifest.name,
        "example": retriever.example,
        "query_features": [
            {
                "name": feature.name,
                "kind": feature.kind,
                "expects": feature.expects,
                "max_length": feature.max_length,
                "dims": feature.dims,
            }
            for feature in retriever.encoder.features
        ],
        "exclude_history": manifest.exclude_history,
        "filterable": _filterable(retriever.catalogue),
        **_weights(retriever.bundle.priors),
        **manifest.model_dump(include=described),
        "available": retriever.availability,
        "proposal": retriever.proposal,
        "forecast": forecast and forecast.model_dump(include={"kind", "served", "until", "horizon", "nats"}),
        "bias_removal": dial,
        "queries": index
        and {
            "count": index.manifest.labels,
            "bias_removal": [float(name) for name in index.priors],
            "filterable": _filterable(index.catalogue),
        },
        "cooccurrence": together
        and {
            **together.model_dump(include={"default", "minimum", "maximum", "kind", "last", "decay"}),
            "query_id": retriever.query_id,
        },
    }


def _filterable(catalogue: Catalogue) -> list[dict[str, Any]]:
    """List `Filterable` of the HTTP API by column."""
    return [
        {"name": name, "kind": kind, "operators": operators(kind)} for name, kind in catalogue.attributes.kinds.items()
    ]


def _weights(priors: Priors) -> dict[str, Any]:
    """Return what requests may weigh."""
    weights_json: dict[str, Any] = {"priors": [], "bonus": {}, "slope": {}, "decay": {}}
    for prior in priors.settings:
        more = {"priors": "name", "bonus": "filter", "slope": "origin"}.get(prior.group)
        limits = prior.model_dump(include={"minimum", "default", "maximum", *([more] if more else [])})
        if prior.group == "priors":
            state = prior.exposure
            limits["exposure"] = state and state.model_dump() | {"half_life": f"{state.half_life / 3600:g}h"}
            weights_json["priors"].append(limits)
        elif more is None:
            limits = {"half_life": f"{24 * math.log(2) / prior.maximum:g}h"}
        if prior.group != "priors":
            weights_json[prior.group][prior.key] = limits
    return weights_json
