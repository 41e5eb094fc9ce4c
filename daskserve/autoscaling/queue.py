"""A policy by the tasks that wait in a broker's queue, beside what runs in the replicas that take them."""

from __future__ import annotations

from daskserve.autoscaling.context import AutoscalingContext, Decision, Policy
from daskserve.autoscaling.custom import WAYS
from daskserve.options.queues import QueueOptions


def queue(
    broker_url: str,
    queue_name: str,
    rabbitmq_management_url: str | None = None,
    poll_interval_s: float = 10.0,
) -> Policy:
    """Return the policy that keeps ``target_ongoing_requests`` tasks and requests per replica.

    The length of the queue comes with the samples; see `daskserve.options.queues.QueueOptions` for the
    parameters, and for what is raised.
    """
    name = QueueOptions(broker_url, queue_name, rabbitmq_management_url, poll_interval_s).queue_name

    def decide(context: AutoscalingContext) -> Decision:
        present, target = context.target_num_replicas, context.config.target_ongoing_requests
        if not context.samples:
            return Decision(present, "no figures yet")
        samples = context.samples if present > 0 else context.samples[-1:]
        requests = WAYS[context.config.aggregation_function](each.ongoing + each.queued for each in samples)
        backlog = samples[-1].backlog
        wanted = context.whole_replicas((requests + (backlog or 0.0)) / target)
        beside = f"{requests:.1f} requests ongoing or queued"
        if backlog is None:
            # What is not known may well be much.
            wanted = max(present, wanted)
            return Decision(
                wanted, f"no fresh length of queue {name!r}, so not fewer than {present}; {beside}: {wanted}"
            )
        return Decision(
            wanted,
            f"{backlog:g} wait in queue {name!r} and {beside}, {target:g} per replica wanted: {wanted}",
        )

    return decide
