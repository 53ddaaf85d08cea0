"""`experiments.toml` beside the releases: arms with shares and settings, and which arm a unit is in.

A unit (a user) is in the arm of the least −ln(u) / share, where u in (0, 1) is a hash of the experiment's salt, the
arm's name and the unit: weighted rendezvous hashing [Schindelhauer, Schomaker 2005, "Weighted distributed hash
tables"]. It is the same in every worker, machine and restart, and in whatever order the file has the arms. Between two
arms no more units move than their shares say; of several, an arm that is added only gains units, one that is taken out
only gives them to others. Whether a unit is in the experiment at all (`traffic`) is another hash: with more traffic no
unit changes its arm.
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
from longtail.serving.core.queries import SearchOptions
from longtail.serving.errors import ServingError

FILE = "experiments.toml"
"""In the directory of releases."""
LARGEST_FILE = 1 << 16
MOST_ARMS = 8
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
_OF_REQUESTS_ALONE = {"exclude", "allow", "buckets", "filter"}
"""What is eligible is the request's to say: an arm that changed it would be another question, not another answer."""
SETTINGS = tuple(name for name in SearchOptions.model_fields if name not in _OF_REQUESTS_ALONE)
"""What an arm may set: fields of a query, for requests that leave all that the experiment's arms set open."""
_TOGETHER = {"bias_removal": {"popularity"}, "popularity": {"bias_removal"}}
"""λ + μ has limits: a request that says one of them is left alone where an arm says the other."""


class ExperimentsError(ServingError):
    """An experiments.toml that cannot be used; seen by the operator, never by a client."""


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _ArmTable(_Table):
    model_config = ConfigDict(strict=True, frozen=True, extra="allow")
    share: float = Field(ge=0, le=1, allow_inf_nan=False)
    release: str | None = Field(default=None, min_length=1, max_length=128)


class _ExperimentTable(_Table):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    unit: str | None = Field(default=None, min_length=1, max_length=256)
    salt: str | None = Field(default=None, min_length=1, max_length=256)
    traffic: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    active: bool = True
    arms: dict[Annotated[str, Field(pattern=_NAME)], _ArmTable] = Field(min_length=2, max_length=MOST_ARMS)


class _File(_Table):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    experiments: dict[Annotated[str, Field(pattern=_NAME)], _ExperimentTable] = Field(default={}, max_length=100)


@dataclass(frozen=True)
class Arm:
    """One way to answer.

    Attributes:
        name: in answers, figures and metrics.
        share: of the experiment's units.
        settings: fields of a query, for requests that leave them open.
        release: that answers; None: the current one.
        key: of the hash that a unit's place in this arm is.
    """

    name: str
    share: float
    settings: Mapping[str, Any]
    release: str | None
    key: bytes

    def distance(self, unit: str) -> float:
        """How far a unit is from this arm: it is in the arm of the least."""
        return -math.log(_point(unit, self.key)) / self.share if self.share else math.inf


@dataclass(frozen=True)
class Experiment:
    """Arms, and who is in which.

    Attributes:
        name: of the experiment.
        unit: feature of a query whose value is the unit; None: only requests that name their unit have one.
        salt: makes this division independent of other experiments'.
        traffic: share of the units that are in the experiment.
        arms: the first is control, which the others are compared with.
    """

    name: str
    unit: str | None
    salt: str
    traffic: float
    arms: tuple[Arm, ...]
    _traffic_key: bytes = field(repr=False, default=b"")

    @cached_property
    def run(self) -> str:
        """Names what is compared: another unit, salt or arm, share or setting makes another run, whose figures begin at
        zero. More or less traffic does not.
        """
        arms = {arm.name: [arm.share, arm.release, arm.settings] for arm in self.arms}
        definition = json.dumps([self.name, self.unit, self.salt, arms], sort_keys=True, default=str)
        return sha256(definition.encode("utf-8", "surrogatepass")).hexdigest()[:12]

    @cached_property
    def turned(self) -> frozenset[str]:
        """Fields of a query that arms set, and those that must be left open with them: a request that sets one of them
        itself is answered as it says, whichever arm it is in, and is in no arm's figures.
        """
        names = {name for arm in self.arms for name in arm.settings}
        return frozenset(names.union(*(_TOGETHER.get(name, set()) for name in names)))

    @cached_property
    def _explored(self) -> tuple[int, frozenset[str]]:
        """The most slots that an arm explores, and the buckets; `(0, …)` is none."""
        explored = [arm.settings["explore"] for arm in self.arms if arm.settings.get("explore")]
        return max((sum(slots.values()) for slots in explored), default=0), frozenset().union(*explored)

    def leaves_open(self, options: SearchOptions) -> bool:
        """Whether a request has left everything open that any arm sets, so that each arm could answer it."""
        given = options.model_fields_set
        if not self.turned.isdisjoint(given):
            return False
        slots, buckets = self._explored
        if slots and "k" in given and options.k < slots:
            return False
        return not (slots and options.buckets is not None and not buckets <= {*options.buckets})

    def arm_of(self, unit: str) -> Arm | None:
        """The arm that a unit is in; None: it is not in the experiment."""
        if self.traffic < 1 and _point(unit, self._traffic_key) >= self.traffic:
            return None
        return min(self.arms, key=lambda arm: arm.distance(unit))

    def design(self, unavailable: Mapping[str, str]) -> dict[str, Any]:
        """What figures are of, as JSON.

        Args:
            unavailable: arms that cannot answer, and why.
        """
        arms = [
            {
                "name": arm.name,
                "share": arm.share,
                "settings": dict(arm.settings),
                "release": arm.release,
                "unavailable": unavailable.get(arm.name),
            }
            for arm in self.arms
        ]
        return {"name": self.name, "run": self.run, "unit": self.unit, "traffic": self.traffic, "arms": arms}

    def named(self, name: str) -> Arm | None:
        """The arm of a name."""
        return next((arm for arm in self.arms if arm.name == name), None)


@dataclass(frozen=True)
class Experiments:
    """What a file says: the experiment that runs, if one does, and the names of others."""

    running: Experiment | None
    others: tuple[str, ...] = ()


def parse_experiments(content: bytes, *, highest_k: int | None = None) -> Experiments:
    """A file's content.

    Args:
        content: TOML.
        highest_k: labels that an arm may set, at most; None: no matter how many.

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
    experiments = [_experiment(name, table, highest_k) for name, table in tables.items()]
    running = [experiment for experiment in experiments if tables[experiment.name].active]
    if len(running) > 1:
        raise ExperimentsError(
            f"expected one experiment at a time, found {', '.join(one.name for one in running)}; "
            "`active = false` stops one"
        )
    others = tuple(one.name for one in experiments if one not in running)
    return Experiments(running[0] if running else None, others)


def _experiment(name: str, table: _ExperimentTable, highest_k: int | None) -> Experiment:
    salt = name if table.salt is None else table.salt
    where = f"experiments.{name}.arms"
    arms = tuple(_arm(f"{where}.{arm}", arm, table.arms[arm], salt, highest_k) for arm in table.arms)
    total = math.fsum(arm.share for arm in arms)
    if abs(total - 1) > 1e-6:
        raise ExperimentsError(f"{where}: expected shares with the sum 1, found {total:.6g}")
    return Experiment(name, table.unit, salt, table.traffic, arms, _key("traffic", salt))


def _arm(where: str, name: str, table: _ArmTable, salt: str, highest_k: int | None) -> Arm:
    settings = dict(table.model_extra or {})
    for setting in settings:
        if setting not in SETTINGS:
            raise ExperimentsError(
                f"{where}: expected share, release or one of {', '.join(SETTINGS)}, found {describe(setting)}"
            )
    try:
        options = SearchOptions.model_validate(settings)
    except ValidationError as error:
        raise _explained(error, f"{where}.") from None
    if highest_k is not None and options.k > highest_k:
        raise ExperimentsError(
            f"{where}.k: expected at most {highest_k} (LONGTAIL_MAX_K, and LONGTAIL_MAX_TOTAL_K for each of "
            f"LONGTAIL_MAX_QUERIES), found {describe(options.k)}"
        )
    return Arm(
        name, table.share, {one: getattr(options, one) for one in settings}, table.release, _key(f"arm {name}", salt)
    )


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
    """In (0, 1), even over units and independent from key to key."""
    return ((unit_number(unit, key) >> 11) + 0.5) / (1 << 53)


def unit_number(unit: str, key: bytes) -> int:
    """64 bits that are the unit's, whatever process asks."""
    digest = blake2b(unit.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")
