"""`experiments.toml` in the directory of releases: arms with shares and settings, and the arm of every unit.

A unit (a user) is in the arm with the least −ln(u) / share, where u in (0, 1) is a hash of the experiment's salt, the
arm's name and the unit: weighted rendezvous hashing [Schindelhauer, Schomaker 2005, "Weighted distributed hash
tables"]. Every worker, machine and restart finds the same arm, in any order of the file. When shares change, only as
many units move as the shares say; an arm that is added only gains units, one that is taken out only gives them away.
`traffic` is another hash: with more of it, no unit changes its arm.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b, sha256
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longtail.bundle.errors import describe
from longtail.serving.core.queries import Query, QueryInArm, SearchOptions
from longtail.serving.errors import InvalidRequestError, ServingError
from longtail.serving.monitoring import ArmAnswer
from longtail.serving.settings import Settings

FILE = "experiments.toml"
LARGEST_FILE = 1 << 16
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
SETTINGS = tuple(name for name in SearchOptions.model_fields if name not in ("exclude", "allow", "buckets", "filter"))
"""What an arm may set. Which labels are eligible is the request's alone to say."""
_TOGETHER = {"bias_removal": {"popularity"}, "popularity": {"bias_removal"}}
"""λ + μ has limits: a request that sets one of them is left alone where an arm sets the other."""


class ExperimentsError(ServingError):
    """An experiments.toml that cannot be used; seen by the operator, never by a client."""


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class _ArmTable(_Table):
    model_config = ConfigDict(extra="allow")
    share: float = Field(ge=0, le=1, allow_inf_nan=False)
    release: str | None = Field(default=None, min_length=1, max_length=128)


class _ExperimentTable(_Table):
    unit: str | None = Field(default=None, min_length=1, max_length=256)
    salt: str | None = Field(default=None, min_length=1, max_length=256)
    traffic: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    active: bool = True
    arms: dict[Annotated[str, Field(pattern=_NAME)], _ArmTable] = Field(min_length=2, max_length=8)


class _File(_Table):
    experiments: dict[Annotated[str, Field(pattern=_NAME)], _ExperimentTable] = Field(default={}, max_length=100)


@dataclass(frozen=True)
class Arm:
    """One way to answer.

    Attributes:
        name: in answers, events and metrics.
        share: of the experiment's units.
        settings: fields of a query, for requests that leave them open.
        release: that answers; None: the current one.
        key: of the arm's hash.
    """

    name: str
    share: float
    settings: Mapping[str, Any]
    release: str | None
    key: bytes

    def distance(self, unit: str) -> float:
        """Compute how far a unit is from this arm; it is in the nearest."""
        return -math.log(_point(unit, self.key)) / self.share if self.share else math.inf


@dataclass(frozen=True)
class Experiment:
    """Arms, and which units are in them.

    Attributes:
        name: of the experiment.
        unit: feature of a query whose value is the unit; None: only the request's `unit` is.
        salt: makes this division independent of other experiments'.
        traffic: share of the units that are in the experiment.
        arms: the first is the control, which the others are compared with.
        unavailable: why arms cannot answer, by name; their units get the default.
    """

    name: str
    unit: str | None
    salt: str
    traffic: float
    arms: tuple[Arm, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def run(self) -> str:
        """Name what is compared: the experiment with a hash of its unit, salt, arms, shares and settings."""
        arms = {arm.name: [arm.share, arm.release, arm.settings] for arm in self.arms}
        definition = json.dumps([self.name, self.unit, self.salt, arms], sort_keys=True, default=str)
        return f"{self.name}-{sha256(definition.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"

    @cached_property
    def _set_by_arms(self) -> frozenset[str]:
        names = {name for arm in self.arms for name in arm.settings}
        return frozenset(names.union(*(_TOGETHER.get(name, set()) for name in names)))

    @cached_property
    def _explored(self) -> tuple[int, frozenset[str]]:
        """The most slots that an arm explores, and the buckets of all arms."""
        explored = [arm.settings["explore"] for arm in self.arms if arm.settings.get("explore")]
        return max((sum(slots.values()) for slots in explored), default=0), frozenset().union(*explored)

    def leaves_open(self, options: SearchOptions) -> bool:
        """Return whether a request sets nothing that any arm sets, so that each arm could answer it."""
        given = options.model_fields_set
        slots, buckets = self._explored
        if not self._set_by_arms.isdisjoint(given) or (slots and "k" in given and options.k < slots):
            return False
        return not (slots and options.buckets is not None and not buckets <= {*options.buckets})

    def arm_of(self, unit: str) -> Arm | None:
        """Get the arm of a unit; None: it is not in the experiment."""
        if self.traffic < 1 and _point(unit, _key("traffic", self.salt)) >= self.traffic:
            return None
        return min(self.arms, key=lambda arm: arm.distance(unit))

    def assign(
        self, query: Query, own: str, *, unit: str | None, arm: str | None, pinned: bool
    ) -> tuple[QueryInArm, str | None]:
        """Give a query the settings of its arm.

        Args:
            query: as the client sent it.
            own: names this query alone: its unit where it has no other.
            unit, arm: of the request.
            pinned: the request names the release that answers.

        Returns:
            The query, which knows its arm, and the release that the arm names.

        Raises:
            InvalidRequestError: there is no such arm.
        """
        known = self._unit_in(query) if unit is None else unit
        drawn = answers = self.arm_of(known or own)
        if arm is not None:
            answers = next((one for one in self.arms if one.name == arm), None)
            if answers is None:
                names = [one.name for one in self.arms]
                raise InvalidRequestError(
                    f"expected one of the arms of {self.name}, {names}, received {describe(arm)}", field="arm"
                )
        number = unit_number(known or own, b"unit")
        if answers is None:
            return query.in_arm(ArmAnswer(self.run, None, number, counted=False), {}), None
        # A vector belongs to the release that it was made for, as if the request named it.
        bound = (pinned or query.vector is not None) and any(one.release for one in self.arms)
        applies = self.leaves_open(query) and not bound and answers.name not in self.unavailable
        # An arm that the request chose is not there by chance, unless chance chose the same.
        counted = applies and (arm is None or (answers is drawn and known is not None))
        given = query.in_arm(ArmAnswer(self.run, answers.name, number, counted), answers.settings if applies else {})
        return given, answers.release if applies else None

    def _unit_in(self, query: Query) -> str | None:
        value = None if self.unit is None else (query.features or {}).get(self.unit)
        return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None


def parse_experiments(content: bytes, settings: Settings | None = None) -> Experiment | None:
    """Read a file's content; None: no experiment runs.

    Args:
        content: TOML.
        settings: limit the `k` of an arm, so that no request outgrows them; None: nothing does.

    Raises:
        ExperimentsError: what is wrong, and where.
    """
    if len(content) > LARGEST_FILE:
        raise ExperimentsError(f"expected at most {LARGEST_FILE} bytes, found {len(content)}")
    try:
        tables = _File.model_validate(tomllib.loads(content.decode("utf-8"))).experiments
    except ValidationError as error:
        raise _explained(error, "") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ExperimentsError(f"expected TOML in UTF-8, found: {str(error)[:200]}") from None
    experiments = [_experiment(name, table, settings) for name, table in tables.items()]
    running = [experiment for experiment in experiments if tables[experiment.name].active]
    if len(running) > 1:
        names = ", ".join(one.name for one in running)
        raise ExperimentsError(f"expected one experiment at a time, found {names}; `active = false` stops one")
    return running[0] if running else None


def _experiment(name: str, table: _ExperimentTable, settings: Settings | None) -> Experiment:
    salt = name if table.salt is None else table.salt
    where = f"experiments.{name}.arms"
    arms = tuple(_arm(f"{where}.{arm}", arm, table.arms[arm], salt, settings) for arm in table.arms)
    total = math.fsum(arm.share for arm in arms)
    if abs(total - 1) > 1e-6:
        raise ExperimentsError(f"{where}: expected shares with the sum 1, found {total:.6g}")
    return Experiment(name, table.unit, salt, table.traffic, arms)


def _arm(where: str, name: str, table: _ArmTable, salt: str, limits: Settings | None) -> Arm:
    given = dict(table.model_extra or {})
    for setting in given:
        if setting not in SETTINGS:
            raise ExperimentsError(
                f"{where}: expected share, release or one of {', '.join(SETTINGS)}, found {describe(setting)}"
            )
    try:
        options = SearchOptions.model_validate(given)
    except ValidationError as error:
        raise _explained(error, f"{where}.") from None
    highest = None if limits is None else max(1, min(limits.max_k, limits.max_total_k // limits.max_queries))
    if highest is not None and options.k > highest:
        raise ExperimentsError(
            f"{where}.k: expected at most {highest} (LONGTAIL_MAX_K, and LONGTAIL_MAX_TOTAL_K for each of "
            f"LONGTAIL_MAX_QUERIES), found {describe(options.k)}"
        )
    settings = {setting: getattr(options, setting) for setting in given}
    return Arm(name, table.share, settings, table.release, _key(f"arm {name}", salt))


def _explained(error: ValidationError, prefix: str) -> ExperimentsError:
    first = error.errors(include_url=False)[0]
    where = prefix + ".".join(str(part)[:64] for part in first["loc"] if part != "[key]")
    if first["type"] == "missing":
        return ExperimentsError(f"{where}: expected a value, found none")
    if first["type"] == "extra_forbidden":
        return ExperimentsError(f"{where}: expected no such key")
    expected = str(first["msg"]).removeprefix("Input should be ")
    return ExperimentsError(f"{where}: expected {expected}, found {describe(first['input'])}")


def _key(of: str, salt: str) -> bytes:
    return sha256(f"{of}\0{salt}".encode("utf-8", "surrogatepass")).digest()


def _point(unit: str, key: bytes) -> float:
    """Hash a unit into (0, 1), evenly and independently for every key."""
    return ((unit_number(unit, key) >> 11) + 0.5) / (1 << 53)


def unit_number(unit: str, key: bytes) -> int:
    """Hash a unit to 64 bits, the same in every process."""
    digest = blake2b(unit.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")
