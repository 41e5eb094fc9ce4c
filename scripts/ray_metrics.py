"""Generate the table of docs/metrics.md that maps Ray Serve's metrics to daskserve's.

Without arguments, rewrite the file. With ``--check``, exit with 1 if the file is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from generated_tables import GeneratedTables

from daskserve.telemetry.table import METRICS

_NO_GRPC = "there is no ingress for gRPC"
_NO_HAPROXY = "there is no HAProxy"

#: Ray Serve 2.60's name, without ``ray_`` -> daskserve's short names in backquotes, or why there is none.
RAY: Mapping[str, str] = {
    "serve_num_http_requests": "`http_requests`",
    "serve_num_http_error_requests": "`http_requests` by `code`, `http_errors` by cause",
    "serve_num_deployment_http_error_requests": "`http_requests` by `endpoint` and `code`",
    "serve_http_request_latency_ms": "`http_request_duration_seconds`",
    "serve_num_ongoing_http_requests": "`http_ongoing_requests`",
    "serve_num_grpc_requests": _NO_GRPC,
    "serve_num_grpc_error_requests": _NO_GRPC,
    "serve_num_deployment_grpc_error_requests": _NO_GRPC,
    "serve_grpc_request_latency_ms": _NO_GRPC,
    "serve_num_ongoing_grpc_requests": _NO_GRPC,
    "serve_proxy_status": "`proxy_status`",
    "serve_proxy_shutdown_duration_ms": "none",
    "serve_num_router_requests": "`router_requests`",
    "serve_handle_request_counter": "`handle_requests`",
    "serve_deployment_queued_queries": "`router_queued_requests`",
    "serve_num_ongoing_requests_at_replicas": "`router_ongoing_requests`",
    "serve_reserved_slots_active": "`router_ongoing_requests` counts them",
    "serve_router_args_resolution_latency_ms": "`handle_arguments_wait_seconds`",
    "serve_num_scheduling_tasks": "`router_queued_requests`: a waiting request has no task",
    "serve_num_scheduling_tasks_in_backoff": "`router_retries`: no router polls replicas",
    "serve_request_router_fulfillment_time_ms": "`router_queue_wait_seconds`",
    "serve_request_router_queue_len": "`replica_ongoing_requests`",
    "serve_deployment_replica_starts": "`deployment_replica_starts`",
    "serve_deployment_request_counter": "`deployment_requests`",
    "serve_deployment_error_counter": "`deployment_errors`",
    "serve_deployment_processing_latency_ms": "`deployment_request_duration_seconds`",
    "serve_deployment_max_processing_latency_ms": "a quantile of `deployment_request_duration_seconds`",
    "serve_replica_processing_queries": "`replica_ongoing_requests`",
    "serve_replica_utilization_percent": "`replica_ongoing_requests` / `replica_max_ongoing_requests`",
    "serve_deployment_replica_healthy": "`replica_healthy`",
    "serve_record_autoscaling_stats_failed": "none; the replica logs the error",
    "serve_user_autoscaling_stats_latency_ms": "none",
    "serve_replica_startup_latency_ms": "`deployment_replica_startup_seconds`",
    "serve_replica_initialization_latency_ms": "`deployment_replica_startup_seconds`",
    "serve_replica_reconfigure_latency_ms": "`deployment_reconfigure_seconds`",
    "serve_replica_shutdown_duration_ms": "`deployment_replica_shutdown_seconds`",
    "serve_health_check_latency_ms": "`deployment_health_check_seconds`",
    "serve_health_check_failures_total": "`deployment_health_check_failures`",
    "serve_application_status": "`application_status`",
    "serve_deployment_status": "`deployment_status`",
    "serve_autoscaling_desired_replicas": "`autoscaling_wanted_replicas`",
    "serve_autoscaling_target_replicas": "`deployment_wanted_replicas`",
    "serve_autoscaling_total_requests": "`router_queued_requests` + `router_ongoing_requests`",
    "serve_autoscaling_target_ongoing_requests": "an option, which `daskserve explain` shows",
    "serve_autoscaling_policy_execution_time_ms": "`control_loop_duration_seconds` has it as a part",
    "serve_autoscaling_replica_metrics_delay_ms": "none",
    "serve_autoscaling_handle_metrics_delay_ms": "none",
    "serve_routing_stats_delay_ms": "load comes with each answer, so it has no delay of its own",
    "serve_routing_stats_error": "none; the replica logs the error",
    "serve_controller_control_loop_duration_s": "`control_loop_duration_seconds`",
    "serve_controller_node_update_duration_s": "`control_loop_duration_seconds`",
    "serve_controller_proxy_state_update_duration_s": "`control_loop_duration_seconds`",
    "serve_controller_deployment_state_update_duration_s": "`control_loop_duration_seconds`",
    "serve_controller_application_state_update_duration_s": "`control_loop_duration_seconds`",
    "serve_controller_sleep_duration_s": "the loop runs when something changes",
    "serve_controller_num_control_loops": "the count of `control_loop_duration_seconds`",
    "serve_num_compacted_nodes": "`replica_moves`",
    "serve_long_poll_latency_ms": "`long_poll_delay_seconds`",
    "serve_long_poll_host_transmission_counter": "`long_poll_fetches`",
    "serve_long_poll_pending_clients": "`long_poll_waiting_calls`",
    "serve_event_loop_scheduling_latency_ms": "`deployment_loop_blocks` counts the long ones",
    "serve_event_loop_monitoring_iterations": "`deployment_loop_blocks`",
    "serve_event_loop_tasks": "`daskserve controller-health`, for the controller",
    "serve_batch_wait_time_ms": "`batch_wait_seconds`",
    "serve_batch_execution_time_ms": "`batch_duration_seconds`",
    "serve_batch_utilization_percent": "`batch_utilization_ratio`",
    "serve_actual_batch_size": "`batch_size`",
    "serve_batch_queue_length": "`batch_queued_items`",
    "serve_batches_processed": "the count of `batch_size`",
    "serve_multiplexed_model_load_latency_ms": "`multiplexed_model_load_seconds`",
    "serve_multiplexed_model_unload_latency_ms": "`multiplexed_model_unload_seconds`",
    "serve_num_multiplexed_models": "`replica_multiplexed_models`",
    "serve_registered_multiplexed_model_id": "`replica_multiplexed_model`",
    "serve_multiplexed_get_model_requests_counter": "`multiplexed_model_requests`",
    "serve_multiplexed_models_load_counter": "`multiplexed_model_loads`",
    "serve_multiplexed_models_unload_counter": "`multiplexed_model_unloads`",
    "serve_haproxy_update_latency_s": _NO_HAPROXY,
    "serve_haproxy_process_count": _NO_HAPROXY,
    "serve_haproxy_target_mismatch": _NO_HAPROXY,
    "serve_haproxy_ingress_router_requests": _NO_HAPROXY,
    "serve_haproxy_ingress_router_truncations": _NO_HAPROXY,
    "serve_haproxy_ingress_router_server_mismatch": _NO_HAPROXY,
    "serve_haproxy_ingress_router_failures": _NO_HAPROXY,
    "serve_haproxy_ingress_router_latency_ms": _NO_HAPROXY,
}


def _exported(match: re.Match[str]) -> str:
    spec = METRICS.get(match[1])
    return match[0] if spec is None else f"`{spec.exported_name}`"


def table() -> str:
    """Return the table as Markdown."""
    rows = (f"| `ray_{name}` | {re.sub('`([^`]+)`', _exported, ours)} |" for name, ours in RAY.items())
    return "\n| Ray Serve | daskserve |\n| --- | --- |\n" + "\n".join(rows) + "\n\n"


TABLES = GeneratedTables("docs/metrics.md", "ray metrics", table)


if __name__ == "__main__":
    sys.exit(TABLES.main())
