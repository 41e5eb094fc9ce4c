"""Alert rules, tested with promtool: series that fire each rule, and series that do not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from daskserve.cli.main import main
from daskserve.dashboards.files import ERROR_RATIO, P99_S, rules
from daskserve.telemetry.table import METRICS

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool comes with Debian's package prometheus"
)

RULES: Sequence[Mapping[str, Any]] = yaml.safe_load(rules())["groups"][0]["rules"]
ALERTS = {each["alert"]: each for each in RULES}
D = {"serve_instance": "i", "deployment": "d"}
E = {"serve_instance": "i", "endpoint": "e"}
I = {"serve_instance": "i"}  # noqa: E741
SCHEDULER = {"job": "daskserve", "instance": "h:1"}


@dataclass(frozen=True)
class Case:
    """Series with one value per minute, in promtool's notation; those in ``fires`` raise the alert."""

    #: The labels of the alert, and the text of its value.
    labels: Mapping[str, str]
    value: str
    fires: Sequence[tuple[str, Mapping[str, str], str]]
    is_silent: Sequence[tuple[str, Mapping[str, str], str]]
    at: str = "20m"


def shares(whole: str, part: str, labels: Mapping[str, str]) -> Case:
    """Return a case in which one counter is either a large or a small share of another."""
    return Case(
        labels,
        "10%",
        [(whole, labels, "0+600x30"), (part, labels, "0+60x30")],
        [(whole, labels, "0+600x30"), (part, labels, "0+4x30")],
    )


def slow(name: str, labels: Mapping[str, str], value: str) -> Case:
    """Return a case of a histogram with 2 of 100 values above one second, or with none."""

    def buckets(below: str) -> list[tuple[str, Mapping[str, str], str]]:
        counts = {"1": below, "2.5": "0+100x40", "+Inf": "0+100x40"}
        return [(f"{name}_bucket", {**labels, "le": bound}, count) for bound, count in counts.items()]

    return Case(labels, value, buckets("0+98x40"), buckets("0+100x40"), at="30m")


WANTED, RUNNING = "daskserve_deployment_wanted_replicas", "daskserve_deployment_replicas"
STARTED = "daskserve_replica_start_time_seconds"
UP = {**D, "state": "RUNNING"}


def lives(*minutes: int) -> list[tuple[str, Mapping[str, str], str]]:
    """Return the start times of replicas that start at these minutes and run for two minutes."""
    return [
        (
            STARTED,
            {**D, "replica": f"d#{minute}", "instance": f"h:{minute}"},
            f"_x{minute} {60 * minute}x2 stale",
        )
        for minute in minutes
    ]


CASES: Mapping[str, Case] = {
    "DaskserveErrorRatio": shares(
        "daskserve_deployment_requests_total", "daskserve_deployment_errors_total", D
    ),
    "DaskserveHttpErrorRatio": Case(
        E,
        "10%",
        [
            ("daskserve_http_requests_total", {**E, "code": "200"}, "0+90x30"),
            ("daskserve_http_requests_total", {**E, "code": "503"}, "0+10x30"),
        ],
        [
            ("daskserve_http_requests_total", {**E, "code": "200"}, "0+90x30"),
            ("daskserve_http_requests_total", {**E, "code": "404"}, "0+10x30"),
        ],
    ),
    "DaskserveLatency": slow("daskserve_http_request_duration_seconds", E, "1.75s"),
    "DaskserveRequestsRefused": shares(
        "daskserve_router_requests_total", "daskserve_router_rejections_total", D
    ),
    "DaskserveRequestsTimeOut": shares(
        "daskserve_deployment_requests_total", "daskserve_deployment_timeouts_total", D
    ),
    "DaskserveSlotsLost": Case(
        D,
        "75%",
        [
            ("daskserve_replica_abandoned_requests", {**D, "replica": "r"}, "3x30"),
            ("daskserve_replica_max_ongoing_requests", {**D, "replica": "r"}, "4x30"),
        ],
        [
            ("daskserve_replica_abandoned_requests", {**D, "replica": "r"}, "2x30"),
            ("daskserve_replica_max_ongoing_requests", {**D, "replica": "r"}, "4x30"),
        ],
    ),
    "DaskserveDeploymentDown": Case(
        D, "0", [(WANTED, D, "2x30"), (RUNNING, UP, "0x30")], [(WANTED, D, "0x30"), (RUNNING, UP, "0x30")]
    ),
    "DaskserveReplicasMissing": Case(
        D, "1", [(WANTED, D, "3x30"), (RUNNING, UP, "2x30")], [(WANTED, D, "3x30"), (RUNNING, UP, "3x30")]
    ),
    "DaskserveReplicasRestart": Case(
        D,
        "5",
        [(WANTED, D, "2x60"), *lives(1, 26, 28, 30, 32, 34)],
        [(WANTED, D, "2x60"), *lives(1, 2, 3, 28, 30, 32, 34)],
        at="36m",
    ),
    "DaskserveReplicasDoNotStart": Case(
        D,
        "10",
        [("daskserve_deployment_replica_start_failures_total", D, "0+1x30")],
        [("daskserve_deployment_replica_start_failures_total", D, "0x15 1x15")],
    ),
    "DaskserveHealthProbesFail": Case(
        D,
        "10",
        [("daskserve_deployment_health_check_failures_total", D, "0+1x30")],
        [("daskserve_deployment_health_check_failures_total", D, "0x15 3x15")],
    ),
    "DaskserveEventLoopBlocked": Case(
        D,
        "2",
        [("daskserve_deployment_loop_blocks_total", D, "0+2x30")],
        [("daskserve_deployment_loop_blocks_total", D, "0x15 3x15")],
    ),
    "DaskserveRouterFails": Case(
        D,
        "2",
        [("daskserve_router_fallbacks_total", {**D, "cause": "late"}, "0+2x30")],
        [("daskserve_router_fallbacks_total", {**D, "cause": "late"}, "0x15 3x15")],
    ),
    "DaskserveLogRecordsDropped": Case(
        {"instance": "w", "reason": "file"},
        "2",
        [("daskserve_log_records_dropped_total", {"instance": "w", "reason": "file"}, "0+2x30")],
        [("daskserve_log_records_dropped_total", {"instance": "w", "reason": "file"}, "0x15 3x15")],
    ),
    "DaskservePayloadsDropped": Case(
        {**D, "reason": "sink"},
        "2",
        [("daskserve_payload_log_dropped_total", {**D, "reason": "sink"}, "0+2x30")],
        [("daskserve_payload_log_dropped_total", {**D, "reason": "sink"}, "0x15 3x15")],
    ),
    "DaskserveProxyDown": Case(
        {**I, "proxy": "p", "status": "STARTING"},
        "1",
        [("daskserve_proxy_status", {**I, "proxy": "p", "status": "STARTING"}, "1x30")],
        [
            ("daskserve_proxy_status", {**I, "proxy": "p", "status": "RUNNING"}, "1x30"),
            ("daskserve_proxy_status", {**I, "proxy": "p@1", "status": "DRAINING"}, "1x30"),
        ],
    ),
    "DaskserveGoalsStuck": Case(
        I, "1", [("daskserve_goals_pending", I, "1x30")], [("daskserve_goals_pending", I, "1x10 0 1x20")]
    ),
    "DaskserveControllerAbsent": Case(
        I,
        "2",
        [("daskserve_supervisor_controller_starts_total", I, "2x30")],
        [
            ("daskserve_supervisor_controller_starts_total", I, "2x30"),
            ("daskserve_controller_epoch", {**I, "instance": "h:2"}, "2x30"),
        ],
    ),
    "DaskserveStoreTaken": Case(
        I, "0", [("daskserve_store_owned", I, "0x30")], [("daskserve_store_owned", I, "0x1 1x30")]
    ),
    "DaskserveControlLoopStopped": Case(
        I,
        "0",
        [("daskserve_control_loop_duration_seconds_count", I, "5x30")],
        [("daskserve_control_loop_duration_seconds_count", I, "0+12x30")],
    ),
    "DaskserveControlLoopSlow": slow("daskserve_control_loop_duration_seconds", I, "1.75s"),
    "DaskserveControlLoopFails": Case(
        I,
        "2",
        [("daskserve_control_loop_failures_total", I, "0+2x30")],
        [("daskserve_control_loop_failures_total", I, "0x15 3x15")],
    ),
    "DaskserveTargetDown": Case(SCHEDULER, "0", [("up", SCHEDULER, "0x30")], [("up", SCHEDULER, "1x30")]),
    "DaskserveNoTargets": Case(
        {"job": "daskserve"}, "1", [("up", {"job": "other"}, "1x30")], [("up", SCHEDULER, "0x30")]
    ),
    "DaskserveWorkersRefused": Case(
        SCHEDULER,
        "2",
        [("daskserve_supervisor_refused_workers", SCHEDULER, "2x30")],
        [("daskserve_supervisor_refused_workers", SCHEDULER, "0x30")],
    ),
}


def written(text: str, case: Case) -> str:
    """Return an annotation as Prometheus renders it."""
    text = re.sub(r"\{\{ \$value.*?\}\}", case.value, text)
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: case.labels[match[1]], text)


def selected(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in labels.items())}}}"


def unit_tests(alert: Mapping[str, Any], case: Case) -> list[object]:
    """Return two tests for promtool: one with the complete alert, and one without an alert."""
    raised = {
        "exp_labels": {**case.labels, "severity": alert["labels"]["severity"]},
        "exp_annotations": {
            "summary": written(alert["annotations"]["summary"], case),
            "description": written(alert["annotations"]["description"], case),
        },
    }
    return [
        {
            "interval": "1m",
            "input_series": [{"series": selected(*each[:2]), "values": each[2]} for each in series],
            "alert_rule_test": [{"eval_time": case.at, "alertname": alert["alert"], "exp_alerts": expected}],
        }
        for series, expected in ((case.fires, [raised]), (case.is_silent, []))
    ]


def promtool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=60, cwd=folder, env=environment
    )


def run_unit_tests(folder: Path, text: str) -> str:
    """Return promtool's errors about rules."""
    tests = [test for name, case in CASES.items() for test in unit_tests(ALERTS[name], case)]
    whole = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "rules.yaml").write_text(text)
    (folder / "tests.yaml").write_text(json.dumps(whole))  # JSON is YAML
    done = promtool(folder, "test", "rules", "tests.yaml")
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_each_rule_has_a_case() -> None:
    assert list(CASES) == list(dict.fromkeys(CASES))
    assert set(CASES) == set(ALERTS)
    assert len(ALERTS) == len(RULES)


@needs_promtool
def test_rules_fire_only_for_their_cases(tmp_path: Path) -> None:
    assert run_unit_tests(tmp_path, rules()) == ""


@pytest.mark.nightly
@needs_promtool
def test_a_wrong_rule_fails_its_case(tmp_path: Path) -> None:
    """Break every rule in two ways: it never fires, or its text omits the value."""
    never = re.sub(r"(?m)^    expr: .*(\n      .*)*$", "    expr: vector(1) > 1", rules())
    found = run_unit_tests(tmp_path, never)
    assert [name for name in CASES if name not in found] == []
    deaf = run_unit_tests(tmp_path, rules().replace("$value", "1"))
    assert [name for name in CASES if CASES[name].value != "1" and name not in deaf] == []


@needs_promtool
@pytest.mark.parametrize("limits", [(ERROR_RATIO, P99_S), (0.001, 0.25)])
def test_promtool_accepts_the_rules(limits: tuple[float, float], tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rules(*limits))
    done = promtool(tmp_path, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@needs_promtool
def test_promtool_accepts_the_documented_configuration(tmp_path: Path) -> None:
    """Write the output of `scrape-config` to a file, with the line about rules that `grafana` prints."""
    written = CliRunner().invoke(main, ["metrics", "grafana", "--output", str(tmp_path)]).output
    (line,) = re.findall(r'"(rule_files: .*)"', written)
    configuration = CliRunner().invoke(main, ["metrics", "scrape-config", "http://h:8787"]).output
    (tmp_path / "prometheus.yml").write_text(configuration + line)
    done = promtool(tmp_path, "check", "config", "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_each_alert_names_its_subject_and_its_value() -> None:
    for name, alert in ALERTS.items():
        texts = alert["annotations"]
        assert name.startswith("Daskserve")
        assert "$value" in texts["description"], name
        assert re.fullmatch(r"[A-Z].*[a-z0-9}x]", texts["summary"]), name
        assert texts["description"].endswith((".", "?")), name
        assert re.fullmatch(r"\d+m", alert["for"]), name


def test_the_rules_use_exported_metrics_and_the_given_thresholds() -> None:
    exported = {spec.exported_name for spec in METRICS.values()}
    for name, alert in ALERTS.items():
        metrics = re.findall(r"daskserve_\w+", alert["expr"])
        assert {re.sub("_(bucket|sum|count)$", "", each) for each in metrics} <= exported, name
    text = rules(0.001, 0.25)
    assert "@" not in text
    assert text.count("> 0.001\n") == 2
    assert text.count("> 0.25\n") == 1
