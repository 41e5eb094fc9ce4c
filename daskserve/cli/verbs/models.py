"""``daskserve models``: the models of a deployment with a ``model_repository``."""

from __future__ import annotations

import click

from daskserve.cli.completion import complete_applications
from daskserve.cli.instance import InstanceAddress, connected, instance_options, reading, split_target
from daskserve.cli.output import FiniteRange, coloured, json_option, options, print_json
from daskserve.client.views.table import table
from daskserve.common.types import DEFAULT_APPLICATION
from daskserve.options.specs import deployment_tag


@click.group()
def models() -> None:
    """List, load and unload the models of a deployment.

    DEPLOYMENT is APP/NAME, or NAME in the default application.
    """


deployment_options = options(
    click.argument("deployment", shell_complete=complete_applications), instance_options, json_option
)


def tag_of(deployment: str) -> str:
    """Return the tag of a deployment given as APP/NAME or NAME."""
    application, name = split_target(deployment)
    return (
        deployment_tag(DEFAULT_APPLICATION, application)
        if name is None
        else deployment_tag(application, name)
    )


@models.command(name="list")
@deployment_options
def list_(at: InstanceAddress, deployment: str, as_json: bool) -> None:
    """List the models of DEPLOYMENT: loaded, failed, and those that are only in its folder.

    Exits with 1 if a version has failed to load, or was rolled back.
    """
    with reading(at) as client:
        found = client.list_models(tag_of(deployment))
    if as_json:
        print_json(found)
    else:
        rows = [
            (model, version, each["state"], "yes" if each["is_default"] else "", each["reason"])
            for model, versions in sorted(found.items())
            for version, each in versions.items()
        ]
        text = table(("MODEL", "VERSION", "STATE", "DEFAULT", "REASON"), rows) if rows else "No models."
        click.echo(coloured(text))
    if any(
        each["state"] in ("FAILED", "TAKEN_BACK") for versions in found.values() for each in versions.values()
    ):
        click.get_current_context().exit(1)


@models.command()
@deployment_options
@click.argument("model")
@click.argument("version", required=False)
@click.option("--no-default", is_flag=True, help="Leave the default version as it is.")
@click.option("--timeout-s", type=FiniteRange(0), help="How long to wait. Default: as long as it takes.")
def load(
    at: InstanceAddress,
    deployment: str,
    model: str,
    version: str | None,
    no_default: bool,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Load VERSION of MODEL, by default the newest, in all replicas of DEPLOYMENT, and wait for it."""
    with connected(at) as client:
        tag = tag_of(deployment)
        loaded = client.load_model(tag, model, version, default=not no_default, timeout_s=timeout_s)
        state = client.list_models(tag).get(model, {}).get(loaded, {}).get("state")
    if as_json:
        print_json({"deployment": tag, "model": model, "version": loaded, "state": state})
        return
    begun = f"; its rollout has begun: daskserve rollout status {deployment} --model {model}"
    click.echo(f"Version {loaded} of model {model} is loaded{begun if state == 'ROLLING_OUT' else ''}.")


@models.command()
@deployment_options
@click.argument("model")
@click.argument("version", required=False)
def unload(at: InstanceAddress, deployment: str, model: str, version: str | None, as_json: bool) -> None:
    """Unload VERSION of MODEL, or all of its versions, from the replicas of DEPLOYMENT."""
    with connected(at) as client:
        client.unload_model(tag_of(deployment), model, version)
    _print_result(deployment, model, version, "unloaded", as_json=as_json)


@models.command()
@deployment_options
@click.argument("model")
@click.argument("version")
def default(at: InstanceAddress, deployment: str, model: str, version: str, as_json: bool) -> None:
    """Make VERSION, which must be loaded, the default version of MODEL."""
    with connected(at) as client:
        client.set_default_model(tag_of(deployment), model, version)
    _print_result(deployment, model, version, "the default", as_json=as_json)


def _print_result(deployment: str, model: str, version: str | None, what: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"deployment": tag_of(deployment), "model": model, "version": version, "is": what})
    else:
        which = f"Version {version}" if version is not None else "Each version"
        click.echo(f"{which} of model {model} is {what}.")
