"""A request under an experiment: the arm of each of its queries, with that arm's settings, and what the answer says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import orjson
from pydantic import JsonValue

from longtail.bundle.errors import describe
from longtail.serving.core.experiments import Arm, Experiment, unit_number
from longtail.serving.core.queries import Query
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError
from longtail.serving.monitoring import ArmAnswer, LeftOut

_UNIT_KEY = b"unit"


@dataclass(frozen=True, slots=True)
class Unit:
    """Whom or what a request is of, as far as it says so itself.

    Attributes:
        unit: its own name for the unit; None: the experiment's feature is, or there is none.
        arm: the arm that it wants; None: that of its unit.
    """

    unit: str | None = None
    arm: str | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """The arm that a query is in.

    Attributes:
        experiment: that divides units.
        arm: None: the unit is not in the experiment.
        by: what decided: the request's `arm`, its `unit`, the experiment's feature, or the answer's own id.
        unit: a hash of the unit.
        left_out: why the answer is in no arm's figures; None: it is in them.
    """

    experiment: Experiment
    arm: Arm | None
    by: Literal["arm", "unit", "feature", "answer"]
    unit: int
    left_out: LeftOut | None

    @property
    def applies(self) -> bool:
        """Whether the arm's settings and release are those that answer."""
        return self.arm is not None and self.left_out in (None, "named")

    def record(self) -> ArmAnswer | None:
        """What is counted; None of a unit outside."""
        if self.arm is None:
            return None
        return ArmAnswer(self.experiment.run, self.arm.name, self.unit, self.by == "answer", self.left_out)

    def json(self, release: str | None, *, preview: bool) -> bytes:
        """What a result begins with, without the brace.

        Args:
            release: that answered, if it is not the one that the whole answer names.
            preview: nobody sees the answer, which is in no figures.
        """
        said: dict[str, JsonValue] = {
            "experiment": self.experiment.name,
            "arm": None if self.arm is None else self.arm.name,
            "assigned_by": self.by,
            "counted": self.arm is not None and self.left_out is None and not preview,
        }
        return orjson.dumps(said if release is None else {**said, "release": release})[1:-1]


@dataclass(frozen=True, slots=True)
class Part:
    """Queries of one request that one release answers.

    Attributes:
        retriever: that release.
        places: where they stand in the request.
        queries: with the settings of their arms.
        assignments: of each.
    """

    retriever: Retriever
    places: list[int]
    queries: list[Query]
    assignments: list[Assignment]

    @property
    def turned(self) -> bool:
        """Whether an arm has a say in it."""
        return any(assignment.applies for assignment in self.assignments)

    def by_default(self, queries: Sequence[Query], retriever: Retriever) -> Part:
        """The same without what arms say, which then could not answer.

        Args:
            queries: of the whole request, as the client sent them.
            retriever: the release that answers by default.
        """
        assignments = [replace(one, left_out="unavailable") if one.applies else one for one in self.assignments]
        return Part(retriever, self.places, [queries[place] for place in self.places], assignments)


@dataclass(frozen=True, slots=True)
class Trial:
    """An experiment that runs, and what of it can be done.

    Attributes:
        experiment: as the file says.
        unavailable: arms that cannot answer, and why: their units get the default.
    """

    experiment: Experiment
    unavailable: Mapping[str, str]

    async def answer(
        self,
        queries: Sequence[Query],
        asked: Unit,
        answer_id: str,
        releases: tuple[Retriever, Callable[[str | None], Retriever]],
        search: Callable[[Part], Awaitable[list[bytes]]],
        *,
        pinned: bool,
        preview: bool,
    ) -> tuple[list[bytes], str]:
        """The results of a request, each with its arm, and the release that the answer names.

        Args:
            queries: as the client sent them.
            asked: what the request says of its unit.
            answer_id: the answer's.
            releases: the one that answers by default, and the one of an arm that names it.
            search: gives the results of a part.
            pinned: the request names the release that is to answer.
            preview: nobody will see the answer.

        Raises:
            InvalidRequestError: as `assign`, and as `search` for a request that would be refused without arms, too.
            ServingError: as `search`.
        """
        retriever, of_arm = releases
        assignments = [
            self.assign(query, asked, f"{place}:{answer_id}", pinned=pinned) for place, query in enumerate(queries)
        ]

        async def answered(part: Part) -> tuple[Part, list[bytes]]:
            try:
                return part, await search(part)
            except InvalidRequestError:
                if not part.turned:
                    raise
            # No request is refused because of an arm: what is wrong with it without one is said, if anything is.
            return await answered(part.by_default(queries, retriever))

        found = await asyncio.gather(*map(answered, in_parts(assignments, queries, retriever, of_arm)))
        names = {part.retriever.name for part, _ in found}
        release = names.pop() if len(names) == 1 else retriever.name
        results = [b""] * len(queries)
        for part, of_part in found:
            other = None if part.retriever.name == release else part.retriever.name
            for place, assignment, result in zip(part.places, part.assignments, of_part, strict=True):
                results[place] = b"{%b,%b" % (assignment.json(other, preview=preview), result[1:])
        return results, release

    def assign(self, query: Query, asked: Unit, own: str, *, pinned: bool) -> Assignment:
        """The arm of a query.

        Args:
            query: as the client sent it.
            asked: what the request says of its unit.
            own: the answer's id and the query's place, which nothing else has.
            pinned: the request names the release that is to answer.

        Raises:
            InvalidRequestError: it names an arm that there is not.
        """
        experiment = self.experiment
        by: Literal["arm", "unit", "feature", "answer"]
        if asked.unit is not None:
            unit, by = asked.unit, "unit"
        elif (named := self._unit_in(query)) is not None:
            unit, by = named, "feature"
        else:
            unit, by = own, "answer"
        arm = experiment.arm_of(unit)
        left_out: LeftOut | None = None
        if asked.arm is not None:
            wanted = experiment.named(asked.arm)
            if wanted is None:
                raise InvalidRequestError(
                    f"expected one of the arms of {experiment.name}, {[arm.name for arm in experiment.arms]}, received "
                    f"{describe(asked.arm)}",
                    field="arm",
                )
            # Whoever chooses an arm is not there by chance, unless it is where chance has put them.
            left_out = None if wanted is arm and by != "answer" else "named"
            arm, by = wanted, "arm"
        if arm is not None:
            # A vector belongs to the release that it was made for, as if the request named it.
            bound = pinned or query.vector is not None
            if not experiment.leaves_open(query) or (bound and any(one.release for one in experiment.arms)):
                left_out = "own_settings"
            elif arm.name in self.unavailable:
                left_out = "unavailable"
        return Assignment(experiment, arm, by, unit_number(unit, _UNIT_KEY), left_out)

    def _unit_in(self, query: Query) -> str | None:
        """The unit that a query's features name."""
        value = None if self.experiment.unit is None else (query.features or {}).get(self.experiment.unit)
        return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None


def in_parts(
    assignments: Sequence[Assignment],
    queries: Sequence[Query],
    retriever: Retriever,
    of_arm: Callable[[str | None], Retriever],
) -> list[Part]:
    """A request's queries with their arms' settings, by the release that answers them.

    Args:
        assignments: of each query.
        queries: as the client sent them.
        retriever: answers those whose arm names no release.
        of_arm: the release of the name that an arm has.
    """
    parts: dict[str, Part] = {}
    for place, (query, assignment) in enumerate(zip(queries, assignments, strict=True)):
        answers, asked = retriever, query
        if assignment.applies and assignment.arm is not None:
            answers = of_arm(assignment.arm.release)
            if assignment.arm.settings:
                asked = query.model_copy(update=dict(assignment.arm.settings))
        part = parts.setdefault(answers.name, Part(answers, [], [], []))
        part.places.append(place)
        part.queries.append(asked)
        part.assignments.append(assignment)
    return list(parts.values())
