"""``daskserve simulate``: simulate autoscaling policies on a recorded load."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import yaml

from daskserve.cli.output import FiniteRange, json_option, print_json, writing
from daskserve.common.clock import seeded_rng
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.simulation.fleet import Service, SimulationResult
from daskserve.simulation.fleet import simulate as run_simulation
from daskserve.simulation.peers import knative_autoscaler
from daskserve.simulation.queueing import QueueLimits
from daskserve.simulation.report import as_dict, changes, picture, table
from daskserve.simulation.svg import plot
from daskserve.simulation.trace import Trace, TraceError, read_trace

#: A policy for comparison only, which cannot be deployed.
KNATIVE = "knative"


@click.group()
def simulate() -> None:
    """Try autoscaling policies on a recorded load."""


@simulate.command("policy")
@click.option(
    "--trace",
    "trace_path",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="CSV file with the columns timestamp_s,requests, or with timestamp_s and a line per request; "
    "duration_s may be added.",
)
@click.option("--policy", help="Policy: a name or an import path, as in AutoscalingConfig.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False),
    help="YAML file with options of AutoscalingConfig; command-line options take precedence.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="OPTION=VALUE",
    help="Another option of AutoscalingConfig. May be repeated.",
)
@click.option("--target", "target_ongoing_requests", type=float, help="The option target_ongoing_requests.")
@click.option("--min", "min_replicas", type=int, help="The option min_replicas.")
@click.option("--max", "max_replicas", type=int, help="The option max_replicas.  [default: 100]")
@click.option("--initial", "initial_replicas", type=int, help="The option initial_replicas.")
@click.option(
    "--concurrency",
    type=int,
    default=8,
    show_default=True,
    help="Maximum number of concurrent requests per replica.",
)
@click.option(
    "--duration-s",
    type=float,
    default=0.1,
    show_default=True,
    help="Mean duration of a request, if the trace has no durations.",
)
@click.option(
    "--duration-cv",
    type=float,
    default=1.0,
    show_default=True,
    help="Standard deviation of durations divided by their mean, if the trace has no durations.",
)
@click.option(
    "--start-up-s",
    type=float,
    default=10.0,
    show_default=True,
    help="Start-up time of a replica.",
)
@click.option(
    "--max-queued",
    type=float,
    default=1000.0,
    show_default=True,
    help="Maximum number of queued requests; more are rejected.",
)
@click.option("--deadline-s", type=float, default=math.inf, help="Maximum waiting time of a request.")
@click.option(
    "--compare",
    multiple=True,
    metavar="POLICY",
    help="Another policy to compare with, or knative. May be repeated.",
)
@click.option("--price", type=FiniteRange(0), default=0.0, help="Price of one replica per hour.")
@click.option("--starts-at", help="Time of day of the trace's first second, ISO 8601, for schedules.")
@click.option("--exact", is_flag=True, help="Simulate single requests instead of a fluid.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random numbers.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False), help="SVG file for a plot.")
@json_option
def policy_command(
    trace_path: str,
    compare: tuple[str, ...],
    price: float,
    starts_at: str | None,
    exact: bool,
    seed: int,
    plot_path: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Simulate a policy on a trace, with the code that runs in the controller."""
    if plot_path is not None and Path(plot_path).suffix != ".svg":
        raise click.UsageError(
            f"--plot is {plot_path}, but plots are SVG; give {Path(plot_path).with_suffix('.svg')}"
        )
    try:
        trace = read_trace(trace_path)
        service = _service(options)
        offset_s = 0.0 if starts_at is None else _wall_time(starts_at) - trace.starts_at
        configs = _configs(options, compare)
        outcomes = [
            run_simulation(
                trace,
                config,
                service,
                name=name,
                make=knative_autoscaler if name == KNATIVE else None,
                is_exact=exact,
                wall_offset_s=offset_s,
                rng=seeded_rng(seed),
            )
            for name, config in configs.items()
        ]
    except (TraceError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if plot_path is not None:
        with writing(plot_path):
            Path(plot_path).write_text(plot(outcomes), encoding="utf-8")
    if as_json:
        print_json([as_dict(outcome, price) for outcome in outcomes])
    else:
        _print(trace, outcomes, price)


def _print(trace: Trace, outcomes: list[SimulationResult], price: float) -> None:
    seconds = len(trace.counts)
    click.echo(
        f"{trace.requests:,.0f} requests in {seconds:,} s, {trace.requests / seconds:,.1f} per second\n"
    )
    click.echo(table(outcomes, price))
    for outcome in outcomes:
        click.echo(f"\n{picture(outcome)}")
    if outcomes[0].history.changes:
        click.echo(f"\nChanges of {outcomes[0].name}, with reasons:\n{changes(outcomes[0])}")


def _configs(options: dict[str, Any], compare: tuple[str, ...]) -> dict[str, AutoscalingConfig]:
    """Return the config of each policy by its display name, the main policy first."""
    values = _from_file(options["config_path"]) | _from_settings(options["settings"])
    given = ("policy", "target_ongoing_requests", "min_replicas", "max_replicas", "initial_replicas")
    values |= {name: options[name] for name in given if options[name] is not None}
    least = values.get("min_replicas")
    values.setdefault("max_replicas", max(100, least) if isinstance(least, int) else 100)
    first = str(values.get("policy", AutoscalingConfig.model_fields["policy"].default))
    found = {}
    for name in dict.fromkeys((first, *compare)):
        # A policy's arguments are not passed to the other policies.
        own = (
            values
            if name == first
            else {key: value for key, value in values.items() if key != "policy_kwargs"}
        )
        own = {key: value for key, value in own.items() if key != "policy"}
        found[name] = AutoscalingConfig(**own) if name == KNATIVE else AutoscalingConfig(policy=name, **own)
    return found


def _from_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"{path} is not a mapping of options; write lines such as max_replicas: 10")
    return found


def _from_settings(settings: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting!r} has no '='; write --set upscale_delay_s=10")
        try:
            found[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {setting!r} has a value that is not YAML: {error}") from error
    return found


def _service(options: dict[str, Any]) -> Service:
    return Service(
        concurrency=options["concurrency"],
        duration_s=options["duration_s"],
        duration_cv=options["duration_cv"],
        start_up_s=options["start_up_s"],
        limits=QueueLimits(options["max_queued"], options["deadline_s"]),
    )


def _wall_time(text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"--starts-at is {text!r}; write it as 2024-03-08T06:00+01:00") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
