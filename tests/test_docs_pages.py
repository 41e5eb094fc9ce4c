"""Code of all pages is valid, and the programs of the pages about platforms and migration work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from scenarios import for_each

from daskserve.testing import local_instance

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(
        rf"^( *)```{language}\n(.*?)^\1```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return [textwrap.dedent(text) for _, text in found]


def test_every_block_can_be_read() -> None:
    """An error names its page."""
    for page in DOCS.rglob("*.md"):
        for block in blocks(page, "python"):
            flags = 0x2000 if "await " in block else 0  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, as in a notebook
            compile(block, str(page), "exec", dont_inherit=True, flags=flags)
        for number, block in enumerate(blocks(page, "yaml")):
            assert list(yaml.safe_load_all(block)), (page, number)


def test_the_service_beside_those_of_others_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "migrate/bentoml-litserve.md"
    (program,) = [each for each in blocks(page, "python") if "daskserve" in each]
    ((command, answer),) = re.findall(r"^\$ (curl .*)\n(.*)$", page.read_text(), re.MULTILINE)
    names: dict[str, Any] = {"__name__": "sums"}
    exec(program, names)
    with local_instance(http_options={"port": 0}) as client:
        client.run(names["app"])
        words = shlex.split(command.replace("http://127.0.0.1:8000", client.http_urls()[0]))
        ended = subprocess.run([*words, "-sS"], capture_output=True, text=True, timeout=30)
    assert (ended.stdout, ended.stderr) == (answer, "")


@for_each("kind", ["SLURMCluster", "PBSCluster"])
def test_a_job_ends_with_its_worker(kind: str) -> None:
    """What dask-jobqueue submits: no shell stays between the job and the worker, and it leaves in time."""
    pytest.importorskip("dask_jobqueue")
    (program,) = [each for each in blocks(DOCS / "platforms/slurm.md", "python") if f" {kind}\n" in each]
    names: dict[str, Any] = {}
    exec(program, names)
    with names["cluster"] as cluster:
        script = cluster.job_script()
    assert f"\nexec {sys.executable} -m distributed.cli.dask_worker " in script
    assert ("#SBATCH --signal=B:TERM@60" in script) == (kind == "SLURMCluster")
    assert ("--lifetime 7h50m" in script) == (kind == "PBSCluster")


def test_the_objects_of_kubernetes_refer_to_each_other() -> None:
    cluster, service, ingress = (
        each
        for block in blocks(DOCS / "platforms/kubernetes.md", "yaml")
        for each in yaml.safe_load_all(block)
    )
    (worker,) = cluster["spec"]["worker"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in worker["ports"]}
    assert (ports["serve"], ports["serve-health"]) == (8000, 8001)
    for probe in ("readinessProbe", "livenessProbe"):
        assert worker[probe]["httpGet"]["port"] in ports
    assert service["spec"]["selector"]["dask.org/cluster-name"] == cluster["metadata"]["name"]
    assert service["spec"]["ports"] == [{"port": 80, "targetPort": "serve"}]
    (rule,) = ingress["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == service["metadata"]["name"]
    (grace,) = [each["value"] for each in worker["env"] if each["name"].endswith("TERMINATION_GRACE_S")]
    assert int(grace) == cluster["spec"]["worker"]["spec"]["terminationGracePeriodSeconds"]
