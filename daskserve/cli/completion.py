"""``daskserve completion``: scripts with which shells complete commands, options, files and names."""

from __future__ import annotations

import http.client
import json
import urllib.request

import click
from click.shell_completion import CompletionItem, get_completion_class

from daskserve.common import settings

SHELLS = ("bash", "zsh", "fish")
#: Timeout of the request for names, because completion must not make the user wait.
NAMES_S = 0.5
_APPLICATIONS = "/api/serve/applications/"
_READ_BYTES = 8 << 20


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script with which SHELL completes commands, options and files.

    \b
    bash: add to ~/.bashrc: eval "$(daskserve completion bash)"
    zsh:  add to ~/.zshrc, after compinit: eval "$(daskserve completion zsh)"
    fish: daskserve completion fish > ~/.config/fish/completions/daskserve.fish

    Names of applications are completed if --address or DASK_SCHEDULER_ADDRESS is the address of the
    scheduler's HTTP server, and the server answers within half a second.
    """
    root = click.get_current_context().find_root()
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(root.command, {}, "daskserve", "_DASKSERVE_COMPLETE").source())


def complete_files(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of files, for an argument that may be a file."""
    return [CompletionItem(incomplete, type="file")]


def complete_applications(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of applications that begin with the typed text; none if the scheduler is slow."""
    variables = settings.process_variables()
    address = ctx.params.get("address") or variables.get("DASK_SCHEDULER_ADDRESS", "")
    if not address.startswith(("http://", "https://")):
        return []  # the Dask client alone takes a second to import
    url = address.rstrip("/").removesuffix("/status") + _APPLICATIONS
    try:
        with urllib.request.urlopen(url, timeout=NAMES_S) as answer:
            names = list(json.loads(answer.read(_READ_BYTES))["applications"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return []  # a shell cannot show an error during completion
    return [CompletionItem(name) for name in names if str(name).startswith(incomplete)]
