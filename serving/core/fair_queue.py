"""What waits for a search, by tenant: who has had least is served next, and a full queue is shared fairly.

A tenant is a client as far as the service can tell them apart. Each has a queue of its own, and a clock that says how
much it was served, in the unit of cost; the next to be served is the one whose clock is behind all others'. One that
comes back from a pause starts where the clock stood that was served last, so that nobody saves up: start-time fair
queueing [Goyal, Vin and Cheng 1996]. A client that asks several models has a tenant for each, a lane: their clocks run
as many times faster, and they have as much less of the queue, so that together they are one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

COMPANY_SECONDS = 1.0
"""How long a tenant that asks no more counts among those that share."""
MOST_TENANTS = 1024
"""Tenants told apart at a time; any more share one queue."""
_OTHERS = object()


class Lane(NamedTuple):
    """The tenant that a client is for one model."""

    client: str
    model: str


class Waiting(Protocol):
    """What waits: the unit of `size` is the queue's limit's, that of `cost` is time's.

    Of one that is `begun` parts have been served, and the rest takes no room any more: its size is 0.
    """

    key: Hashable
    size: int
    cost: float
    since: float
    begun: bool


Job = TypeVar("Job", bound=Waiting)


class _Tenant(Generic[Job]):
    __slots__ = ("client", "clock", "jobs", "seen", "size")

    def __init__(self, name: Hashable, clock: float) -> None:
        self.client = _client(name)
        self.clock = clock
        self.jobs: deque[Job] = deque()
        self.size = 0
        self.seen = 0.0


class FairQueue(Generic[Job]):
    """Jobs of several tenants. Not thread-safe."""

    def __init__(self) -> None:
        self._tenants: dict[Hashable, _Tenant[Job]] = {}
        self._lanes: Counter[Hashable] = Counter()
        """Tenants of each client."""
        self._clock = 0.0
        self._pruned = 0.0
        self.size = 0
        """Size of all that waits."""

    def __bool__(self) -> bool:
        return any(tenant.jobs for tenant in self._tenants.values())

    def __iter__(self) -> Iterator[Job]:
        return (job for tenant in self._tenants.values() for job in tenant.jobs)

    @property
    def oldest(self) -> float:
        """When the job that has waited longest came; there must be one."""
        return min(tenant.jobs[0].since for tenant in self._tenants.values() if tenant.jobs)

    def tenants(self, now: float) -> int:
        """How many tenants share: those of which something waits, or came in the last second."""
        if now - self._pruned > COMPANY_SECONDS / 4:
            self._pruned = now
            for name in [
                name
                for name, tenant in self._tenants.items()
                if not tenant.jobs and now - tenant.seen > COMPANY_SECONDS
            ]:
                del self._tenants[name]
            self._lanes = Counter(tenant.client for tenant in self._tenants.values())
        return len(self._tenants)

    def append(self, name: Hashable, job: Job) -> None:
        """Put a job at the end of its tenant's queue."""
        if name not in self._tenants and self.tenants(job.since) >= MOST_TENANTS:
            name = _OTHERS
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, self._clock)
            self._lanes[tenant.client] += 1
        if not tenant.jobs:
            tenant.clock = max(tenant.clock, self._clock)
        tenant.seen = job.since
        tenant.jobs.append(job)
        tenant.size += job.size
        self.size += job.size

    def may_displace(self, name: Hashable, size: int) -> bool:
        """Whether a job that finds the queue full belongs there all the same: another tenant has more than its own."""
        tenant = self._tenants.get(name)
        lanes = self._lanes[_client(name)] + (tenant is None)
        return (size + (0 if tenant is None else tenant.size)) * lanes < max(map(self._share, self._tenants.values()))

    def has_share(self, name: Hashable, limit: int, now: float) -> bool:
        """Whether a queue of this limit is not half full, or a tenant has less than its share; alone, that is all."""
        if 2 * self.size < limit:
            return True
        tenant = self._tenants.get(name)
        self.tenants(now)
        lanes = self._lanes[_client(name)]
        sharing = len(self._lanes) + (not lanes)
        return (0 if tenant is None else tenant.size) * sharing * (lanes + (tenant is None)) < limit

    def displace(self) -> Job:
        """Take out the newest job of the tenant that has most of the queue."""
        tenant = max(self._tenants.values(), key=self._share)
        job = tenant.jobs.pop()
        self._leave(tenant, job.size)
        return job

    @property
    def next(self) -> Job:
        """The job that is served next; there must be one."""
        return self._first().jobs[0]

    def begin_next(self, cost: float) -> None:
        """A part of the next job is served, of this cost; the rest stays where it is."""
        tenant = self._first()
        job = tenant.jobs[0]
        self._leave(tenant, job.size)
        job.begun, job.size = True, 0
        job.cost -= cost
        self._clock = max(self._clock, tenant.clock)
        tenant.clock += cost * self._lanes[tenant.client]

    def take_batch(self, max_size: int, max_cost: float) -> list[Job]:
        """Take the next job, and such of its key as fit beside it and are not begun, one of each tenant in turn.

        Args:
            max_size, max_cost: of all of them together, unless the first alone has more.
        """
        in_turn = sorted((tenant for tenant in self._tenants.values() if tenant.jobs), key=lambda tenant: tenant.clock)
        self._clock = max(self._clock, in_turn[0].clock)
        first = in_turn[0].jobs[0]
        batch, size, cost = list[Job](), 0, 0.0
        passed: dict[int, deque[Job]] = {}
        while in_turn and size < max_size:
            going_on = []
            for tenant in in_turn:
                jobs = tenant.jobs
                while jobs and batch and not (
                    jobs[0].key == first.key and not jobs[0].begun
                    and size + jobs[0].size <= max_size and cost + jobs[0].cost <= max_cost
                ):  # fmt: skip
                    passed.setdefault(id(tenant), deque()).append(jobs.popleft())
                if jobs:
                    batch.append(job := jobs.popleft())
                    size, cost = size + job.size, cost + job.cost
                    tenant.clock += job.cost * self._lanes[tenant.client]
                    self._leave(tenant, job.size)
                    going_on.append(tenant)
            in_turn = going_on
        for tenant in self._tenants.values():
            if before := passed.get(id(tenant)):
                tenant.jobs.extendleft(reversed(before))
        return batch

    def drop(self, unwanted: Callable[[Job], bool]) -> list[Job]:
        """Take out jobs that nobody wants any more."""
        dropped = []
        for tenant in self._tenants.values():
            if gone := [job for job in tenant.jobs if unwanted(job)]:
                tenant.jobs = deque(job for job in tenant.jobs if not unwanted(job))
                self._leave(tenant, sum(job.size for job in gone))
                dropped += gone
        return dropped

    def _share(self, tenant: _Tenant[Job]) -> int:
        """How much of the queue a client would have if all its tenants had as much as this one."""
        return tenant.size * self._lanes[tenant.client]

    def _first(self) -> _Tenant[Job]:
        return min((tenant for tenant in self._tenants.values() if tenant.jobs), key=lambda tenant: tenant.clock)

    def _leave(self, tenant: _Tenant[Job], size: int) -> None:
        tenant.size -= size
        self.size -= size


def _client(name: Hashable) -> Hashable:
    return name.client if isinstance(name, Lane) else name
