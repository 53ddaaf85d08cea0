"""Towers and feature kinds of one's own, as a recipe names them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, Self, get_args

from pydantic import model_validator

from longtail.trainer import register
from longtail.trainer.config.choice import Choice
from longtail.trainer.layers import FEATURES, TOWERS, FeatureKind, Kind


class TowerChoice(Choice):
    """A tower of one's own: a row of `TOWERS`, by its name, and its parameters."""

    @model_validator(mode="after")
    def _defined(self) -> Self:
        self._check("tower", TOWERS, lambda tower: tower)
        return self


class KindChoice(Choice):
    """A feature kind of one's own: a row of `FEATURES`, by its name, and its parameters."""

    @property
    def row(self) -> FeatureKind:
        """Return the kind."""
        return FEATURES[self.name]

    @classmethod
    def taken_from(cls, feature: Mapping[str, Any], keys: Collection[str]) -> tuple[Self | None, dict[str, Any]]:
        """Return the kind of one's own that a feature of a recipe names, if it is none of ours; and the feature without
        it.

        Args:
            keys: of every feature; all others are parameters of the kind.

        Returns:
            The choice, and the feature with the kind that it reads in the place of its own.
        """
        name = feature.get("kind")
        if not isinstance(name, str) or name in get_args(Kind):
            return None, dict(feature)
        register.find("feature", name)
        if name not in FEATURES:
            raise ValueError(
                f"kind: expected one of {', '.join((*get_args(Kind), *FEATURES))}, received {name!r}, which is neither "
                f"registered nor an entry point of {register.GROUPS['feature']}"
            )
        row = FEATURES[name]
        parameters = inspect.signature(row.part).parameters.values()
        own = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        if taken := sorted(own & set(keys)):
            raise ValueError(
                f"feature {name!r}: expected parameters of other names than a feature's keys, received {taken}"
            )
        choice = cls(name=name, **{key: value for key, value in feature.items() if key not in keys})
        choice._check("feature", FEATURES, lambda row: row.part)
        return choice, {key: value for key, value in feature.items() if key in keys} | {"kind": row.reads}
