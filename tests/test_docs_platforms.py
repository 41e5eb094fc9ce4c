"""The files on the pages about platforms are valid for their systems, if these are installed.

``pip install -e '.[platforms]'`` installs the checkers for Kubernetes, job queues and containers. systemd,
Caddy and nginx (`tests/integration/test_behind_nginx.py`) are packages of Debian.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PLATFORMS = ROOT / "docs/platforms"
KUBERNETES_VERSION = "1.29"


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in found]


def objects(page: str) -> Iterator[dict[str, Any]]:
    """Return the objects of Kubernetes on a page."""
    for block in blocks(ROOT / "docs" / page, "yaml"):
        yield from (each for each in yaml.safe_load_all(block) if each and "kind" in each)


def strict(schema: Any) -> Any:
    """Return a schema that refuses unknown properties, which the API server drops."""
    if isinstance(schema, dict):
        found = {name: strict(each) for name, each in schema.items()}
        if isinstance(found.get("properties"), dict) and "additionalProperties" not in found:
            found["additionalProperties"] = found.get("x-kubernetes-preserve-unknown-fields", False)
        return found
    return [strict(each) for each in schema] if isinstance(schema, list) else schema


def test_the_cluster_of_the_operator_fits_its_definition() -> None:
    operator = pytest.importorskip("dask_kubernetes.operator")
    jsonschema = pytest.importorskip("jsonschema")
    file = Path(operator.__file__).parent / "deployment/helm/dask-kubernetes-operator/crds/daskcluster.yaml"
    (cluster,) = [each for each in objects("platforms/kubernetes.md") if each["kind"] == "DaskCluster"]
    definition = yaml.safe_load(file.read_text())
    group, _, version = cluster["apiVersion"].partition("/")
    assert definition["spec"]["group"] == group
    (schema,) = [
        each["schema"]["openAPIV3Schema"]
        for each in definition["spec"]["versions"]
        if each["name"] == version
    ]
    specification = {"spec": schema["properties"]["spec"]}
    jsonschema.validate({"spec": cluster["spec"]}, strict({"type": "object", "properties": specification}))


@pytest.mark.parametrize("page", ["platforms/kubernetes.md", "scheduler.md", "sigterm.md"])
def test_objects_of_kubernetes_fit_its_schemas(page: str) -> None:
    validation = pytest.importorskip("kubernetes_validate")
    found = [each for each in objects(page) if not each["apiVersion"].startswith("kubernetes.dask.org")]
    for each in found:
        validation.validate(each, KUBERNETES_VERSION, strict=True)
    assert found or page == "sigterm.md"


def test_the_container_file_has_no_faults() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed")
    (text,) = blocks(PLATFORMS / "containers.md", "dockerfile")
    ended = subprocess.run([linter, "-"], input=text, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("", 0)


def test_units_of_systemd_are_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    units = [each for each in blocks(ROOT / "docs/scheduler.md", "ini") if each.startswith("# /etc/systemd/")]
    assert len(units) == 3
    (more,) = blocks(PLATFORMS / "systemd.md", "ini")
    for unit in units:
        name = unit.partition("\n")[0].rpartition("/")[2]
        # The programs of the page are not installed here.
        text = re.sub(r"ExecStart=/opt/serve/bin/(\S+)", f"ExecStart={sys.executable} -m \\1", unit)
        (tmp_path / name).write_text(text)
        folder = tmp_path / f"{name}.d"
        folder.mkdir()
        (folder / "grace.conf").write_text(more)
        command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert name not in ended.stderr, ended.stderr
        assert ended.returncode == 0, ended.stderr


def test_the_configuration_of_caddy_is_valid(tmp_path: Path) -> None:
    if shutil.which("caddy") is None:
        pytest.skip("caddy is not installed")
    (text,) = blocks(ROOT / "SECURITY.md", "caddy")
    (tmp_path / "Caddyfile").write_text(text)
    for action in (["adapt", "--validate"], ["fmt", "--diff"]):
        command = [
            "caddy",
            *action,
            *(["--config"] if action[0] == "adapt" else []),
            str(tmp_path / "Caddyfile"),
        ]
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("kind", ["SLURMCluster", "PBSCluster"])
def test_a_job_ends_with_its_worker(kind: str) -> None:
    """No shell stays between dask-jobqueue's job and its worker, and the worker leaves in time."""
    pytest.importorskip("dask_jobqueue")
    (program,) = [each for each in blocks(PLATFORMS / "slurm.md", "python") if f" {kind}\n" in each]
    names: dict[str, Any] = {}
    exec(program, names)
    with names["cluster"] as cluster:
        script = cluster.job_script()
    assert f"\nexec {sys.executable} -m distributed.cli.dask_worker " in script
    assert ("#SBATCH --signal=B:TERM@60" in script) == (kind == "SLURMCluster")
    assert ("--lifetime 7h50m" in script) == (kind == "PBSCluster")


def test_the_objects_of_kubernetes_refer_to_each_other() -> None:
    cluster, service, ingress = (
        each for block in blocks(PLATFORMS / "kubernetes.md", "yaml") for each in yaml.safe_load_all(block)
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
