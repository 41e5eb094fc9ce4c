"""The client's methods that inspect running user code."""

from __future__ import annotations

from daskserve.client.instance.connection import Verbs
from daskserve.client.views.profile import Profile, Stacks


class InspectingVerbs(Verbs):
    """Methods of a `Client` that profile replicas and show their stacks.

    ``replica`` is a replica's tag, as `status` shows it, or the tag of a deployment, such as
    ``"shop/Model"``, which selects its busiest replica.
    """

    async def profile(self, replica: str, seconds: float = 5.0, *, memory: bool = False) -> Profile:
        """Return what the user code of a replica does for some time: a flame graph, functions, lines.

        The stacks of its threads are sampled every 10 ms, which does not change how user code runs. Time that
        threads wait for their next job does not count.

        Parameters
        ----------
        seconds : float
            At most 60.
        memory : bool
            Find the lines that hold memory instead, with `tracemalloc`, which is turned on for this time if
            it is off. The process is then several times slower, and earlier allocations are unknown.

        Raises
        ------
        NotFoundError
            There is no such replica; the message lists similar names.
        InspectionError
            A profile of this replica is being taken, or its process does not answer.
        """
        return Profile(await self._call("profile", replica=replica, seconds=seconds, memory=memory))

    async def stacks(self, replica: str) -> Stacks:
        """Return what the threads and tasks of a replica's user code do now, even if they are stuck.

        This also works while the replica starts or stops.

        Raises
        ------
        NotFoundError
            There is no such replica; the message lists similar names.
        InspectionError
            Its worker does not answer.
        """
        return Stacks(await self._call("stacks", replica=replica))
