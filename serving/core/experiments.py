"""Read `experiments.toml`, and assign an arm to every unit.

A unit (a user) is in the arm with the least −ln(u) / share, where u in (0, 1) is a hash of the experiment's name, the
arm's name and the unit: weighted rendezvous hashing [Schindelhauer, Schomaker 2005, "Weighted distributed hash
tables"]. Every worker, machine and restart finds the same arm, independent of the order in the file. When shares
change, only the fraction of units by which the shares differ moves; an added arm only gains units, and the units of a
removed arm are distributed over the others.
"""

from __future__ import annotations

import json
import math
import tomllib
from functools import cached_property
from hashlib import blake2b, sha256
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from longtail.bundle.errors import describe
from longtail.bundle.ids import id_text
from longtail.serving.core.queries import ELSEWHERE, RequestModel, RetrieveQuery, SearchOptions
from longtail.serving.errors import InvalidRequestError, ServingError
from longtail.serving.monitoring import ArmAnswer
from longtail.serving.settings import Settings, explain

_ELIGIBLE = ("exclude", "allow", "buckets", "filter")
_TOGETHER = {
    "bias_removal": {"popularity"}, "popularity": {"bias_removal"}, "at_least": {"explore"},
    "explore": {"at_least", "max_per", "mmr"}, "max_per": {"explore"}, "mmr": {"explore"},
}  # fmt: skip
"""Options that count as set together, because a limit holds for both, such as λ + μ, or slots and floors of k, or
because they exclude each other. An arm must not set one where the request sets the other."""
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class ExperimentsError(ServingError):
    """An experiments.toml that cannot be used; only the operator sees this error, never a client."""


class Arm(SearchOptions):
    """Settings for queries that leave the same fields open."""

    share: float = Field(ge=0, le=1, allow_inf_nan=False)
    """Share of the experiment's units."""
    release: str | None = Field(default=None, min_length=1, max_length=128)
    """Name of the loaded release that answers; None: the current one."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the fields of a query that the arm sets."""
        return {name: getattr(self, name) for name in SearchOptions.model_fields if name in self.model_fields_set}

    @property
    def json_settings(self) -> dict[str, Any]:
        """Return `settings` as JSON."""
        return self.model_dump(include={*self.settings}, exclude_unset=True)

    @model_validator(mode="after")
    def _eligible_is_the_request_s_to_say(self) -> Arm:
        if refused := [name for name in _ELIGIBLE if name in self.model_fields_set]:
            raise ValueError(f"no {refused[0]}: the request alone says which labels are eligible")
        return self


class Experiment(RequestModel):
    """Arms with their shares of the units; the first arm is the control of all comparisons."""

    unit: str | None = Field(default=None, min_length=1, max_length=256)
    """Query feature whose value is the unit; None: only the request's `unit` counts."""
    arms: dict[_Name, Arm] = Field(min_length=2, max_length=8)
    _name: str = PrivateAttr("")
    _unavailable: frozenset[str] = PrivateAttr(frozenset())

    @model_validator(mode="after")
    def _check_shares(self) -> Experiment:
        total = math.fsum(arm.share for arm in self.arms.values())
        if abs(total - 1) > 1e-6:
            raise ValueError(f"shares of arms with the sum 1, not {total:.6g}")
        return self

    @property
    def name(self) -> str:
        """Return the experiment's key in the file."""
        return self._name

    def without(self, unavailable: frozenset[str]) -> Experiment:
        """Return the experiment with some arms unavailable: their units get the default."""
        experiment = self.model_copy()
        experiment._unavailable = unavailable
        return experiment

    @cached_property
    def run(self) -> str:
        """Return a name of this run: the experiment's name and a hash of its unit, arms, shares and settings."""
        arms = {name: [arm.share, arm.release, arm.json_settings] for name, arm in self.arms.items()}
        # Sorted, so that another order of keys in the file begins no new run.
        definition = json.dumps([self._name, self.unit, arms], sort_keys=True, default=str)
        return f"{self._name}-{sha256(definition.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"

    @cached_property
    def _keys(self) -> dict[str, bytes]:
        """Return the keys of the hashes, by arm."""
        return {arm: sha256(f"arm {arm}\0{self._name}".encode()).digest() for arm in self.arms}

    @cached_property
    def _set_by_arms(self) -> set[str]:
        names = {name for arm in self.arms.values() for name in arm.settings}
        return names.union(*(_TOGETHER.get(name, ()) for name in names))

    def assign(
        self, query: RetrieveQuery, name: str, *, unit: str | None, arm: str | None, pinned: bool
    ) -> tuple[RetrieveQuery, ArmAnswer, str | None]:
        """Give a query the settings of its arm.

        Args:
            name: unique name of the query, which serves as the unit of a query without one.
            unit: unit given by the request; None: the value of the unit's feature.
            arm: name of the arm that the request chose; None: the unit decides.
            pinned: whether the request names the release that answers.

        Returns:
            The query with the settings of its arm, the arm, and the release that the arm names.

        Raises:
            InvalidRequestError: there is no such arm.
        """
        if unit is None and self.unit is not None:
            unit = id_text((query.features or {}).get(self.unit)) or None
        distances = {}
        for arm_name, arm_settings in self.arms.items():
            number = unit_number(unit or name, self._keys[arm_name])
            # The top 53 bits as a double in (0, 1); the half keeps the logarithm finite.
            logarithm = -math.log(((number >> 11) + 0.5) / (1 << 53))
            # Weighted rendezvous hashing: a changed share moves only the units that it must.
            distances[arm_name] = logarithm / arm_settings.share if arm_settings.share else math.inf
        drawn_arm = min(distances, key=distances.__getitem__)
        if arm is not None and arm not in self.arms:
            raise InvalidRequestError(
                f"expected one of the arms of {self._name}, {[*self.arms]}, received {describe(arm)}", field="arm"
            )
        chosen_arm, options = arm or drawn_arm, self.arms[arm or drawn_arm]
        # A vector is only valid for the release that created it, as if the request named that release.
        bound = (pinned or query.vector is not None) and any(settings.release for settings in self.arms.values())
        # If the request sets a field of any arm, or leaves no room for one, the arms would differ in nothing or fail.
        slots = max(sum(arm.explore.values()) + sum(floor.n for floor in arm.at_least) for arm in self.arms.values())
        buckets = {
            bucket
            for arm in self.arms.values()
            for bucket in (*arm.explore, *(floor.bucket for floor in arm.at_least))
            if bucket is not None
        }
        applies = (
            self._set_by_arms.isdisjoint(query.model_fields_set)
            and ("k" not in query.model_fields_set or query.k >= slots)
            and (query.buckets is None or buckets <= {*query.buckets})
            and not bound
            and chosen_arm not in self._unavailable
        )
        # A chosen arm is not random, so the answer counts only if the unit's hash gives the same arm.
        counted = applies and (arm is None or (arm == drawn_arm and unit is not None))
        answer = ArmAnswer(self.run, chosen_arm, unit_number(unit or name, b"unit"), counted)
        if not applies:
            return query, answer, None
        fields = query.model_fields_set | options.settings.keys()
        # Without validation, which the query and the arm's settings have passed already.
        return RetrieveQuery.model_construct(fields, **{**dict(query), **options.settings}), answer, options.release


class _File(RequestModel):
    experiments: dict[_Name, Experiment] = Field(default={}, max_length=1)


def parse_experiments(content: bytes, settings: Settings | None = None) -> Experiment | None:
    """Read an experiment from TOML; None if the content defines none.

    Args:
        settings: limits for the `k` of an arm, so that no request exceeds them; None: no limits.

    Raises:
        ExperimentsError: the content is wrong; the error says what and where.
    """
    try:
        experiments = _File.model_validate(tomllib.loads(content.decode("utf-8"))).experiments
    except ValidationError as error:
        raise ExperimentsError(": ".join(filter(None, explain(error, _File, ELSEWHERE)))) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ExperimentsError(f"expected TOML in UTF-8, found: {str(error)[:200]}") from None
    most = math.inf if settings is None else max(1, min(settings.max_k, settings.max_total_k // settings.max_queries))
    for name, experiment in experiments.items():
        experiment._name = name
        for arm, options in experiment.arms.items():
            if "k" in options.settings and options.k > most:
                raise ExperimentsError(
                    f"experiments.{name}.arms.{arm}.k: expected at most {most}, so that LONGTAIL_MAX_QUERIES "
                    f"queries stay within the limits of a request, found {describe(options.k)}"
                )
    return next(iter(experiments.values()), None)


def unit_number(unit: str, key: bytes) -> int:
    """Hash a unit to 64 bits, the same in every process."""
    digest = blake2b(unit.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")
