"""A policy that scales on the tasks in a broker's queue plus the requests of the replicas that consume it."""

from __future__ import annotations

from daskserve.autoscaling.context import AutoscalingContext, Decision, Policy
from daskserve.autoscaling.custom import AGGREGATIONS
from daskserve.common.formatting import shown
from daskserve.options.queues import QueueOptions


def queue(
    broker_url: str,
    queue_name: str,
    rabbitmq_management_url: str | None = None,
    poll_interval_s: float = 10.0,
) -> Policy:
    """Return the policy that keeps ``target_ongoing_requests`` tasks plus requests per replica.

    The samples contain the length of the queue. See `daskserve.options.queues.QueueOptions` for the
    parameters and the errors.
    """
    name = QueueOptions(broker_url, queue_name, rabbitmq_management_url, poll_interval_s).queue_name

    def decide(context: AutoscalingContext) -> Decision:
        current, target = context.target_num_replicas, context.config.target_ongoing_requests
        if not context.samples:
            return Decision(current, "no metrics yet")
        samples = context.samples[-1:] if current == 0 or context.is_waking else context.samples
        aggregate = AGGREGATIONS[context.config.aggregation_function]
        requests = aggregate(each.ongoing + each.queued for each in samples)
        backlog = samples[-1].backlog
        wanted = context.whole_replicas((requests + (backlog or 0.0)) / target)
        load = f"{requests:.1f} requests ongoing or queued"
        if backlog is None:
            # A queue of unknown length may be long.
            wanted = max(current, wanted)
            return Decision(
                wanted,
                f"the length of queue {name!r} is unknown, so not fewer than {current}; {load}: {wanted}",
            )
        return Decision(
            wanted,
            f"{shown(backlog)} wait in queue {name!r} and {load}, {shown(target)} per replica wanted: "
            f"{wanted}",
        )

    return decide
