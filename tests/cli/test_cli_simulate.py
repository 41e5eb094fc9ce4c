"""The command ``daskserve simulate policy``: valid and invalid input, and the speed of ``--help``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daskserve.cli.main import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "requests.csv"
    lines = [f"{second},{20 if second < 100 else 200}" for second in range(300)]
    path.write_text("\n".join(["timestamp_s,requests", *lines]))
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["simulate", "policy", *map(str, arguments)])


def test_a_table_sparklines_and_reasons_are_printed(trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "out.svg"
    found = run(
        "--trace", trace, "--compare", "classic", "--compare", "knative", "--plot", plot, "--price", 2
    )
    assert found.exit_code == 0, found.output
    assert found.output.startswith("42,000 requests in 300 s, 140.0 per second\n")
    for name in ("target_ongoing_requests", "classic", "knative"):
        assert f"\n{name}" in found.output
    assert "Changes of target_ongoing_requests, with reasons:" in found.output
    assert plot.read_text().startswith("<svg ")


def test_json_output_and_options_from_all_sources(trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "scaling.yaml"
    config.write_text("max_replicas: 7\nupscale_delay_s: 5\n")
    options = [
        "--config",
        config,
        "--max",
        "4",
        "--set",
        "downscale_delay_s=9",
        "--min",
        "2",
        "--target",
        "1.5",
    ]
    found = run("--trace", trace, "--json", *options)
    assert found.exit_code == 0, found.output
    (outcome,) = json.loads(found.output)
    assert outcome["most_replicas"] == 4
    assert outcome["changes"][0]["before"] == 2
    assert outcome["completed"] + outcome["rejected"] == pytest.approx(42_000, abs=200)


def test_a_policy_with_arguments_is_imported_by_path(trace: Path) -> None:
    options = ["--policy", "test_cli_simulate:always", "--compare", "classic", "--set", "upscale_delay_s=0"]
    found = run("--trace", trace, "--json", *options, "--set", "policy_kwargs={number: 3}")
    assert found.exit_code == 0, found.output
    first, classic = json.loads(found.output)
    assert first["changes"][0]["after"] == 3
    assert first["changes"][0]["reason"] == "the policy wants 3"
    assert classic["policy"] == "classic"


def always(context: object, number: int) -> int:
    return number


def test_the_seed_decides_all_that_is_random(trace: Path) -> None:
    one, again, other = (run("--trace", trace, "--json", "--seed", seed).output for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "fastest"], "it must be one of target_ongoing_requests"),
        (["--policy", "nowhere:f"], "cannot be imported"),
        (["--min", "9", "--max", "3"], "max_replicas=3 is less than min_replicas=9"),
        (["--set", "max_replicas"], "has no '='"),
        (["--set", "nonsense=1"], "nonsense"),
        (["--set", "min_replicas=many"], "min_replicas"),
        (["--set", "policy_kwargs={"], "not YAML"),
        (["--concurrency", "0"], "concurrency is 0"),
        (["--start-up-s", "-1"], "start_up_s is -1"),
        (["--plot", "out.png"], "out.png, but plots are SVG; give out.svg"),
        (["--plot", "/nowhere/at/all/out.svg"], "Could not write"),
        (["--starts-at", "noon"], "write it as 2024-03-08T06:00+01:00"),
        (["--policy", "latency"], "does not accept policy_kwargs"),
    ],
)
def test_bad_options_are_errors_with_a_remedy(trace: Path, arguments: list[str], message: str) -> None:
    found = run("--trace", trace, *arguments)
    assert found.exit_code != 0
    assert message in found.output
    assert "Traceback" not in found.output


def test_bad_files_are_errors_with_a_remedy(trace: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("a: [")
    assert "is not YAML" in run("--trace", trace, "--config", bad).output
    bad.write_text("- 1")
    assert "is not a mapping of options" in run("--trace", trace, "--config", bad).output
    assert "has the columns - 1" in run("--trace", bad).output
    assert "does not exist" in run("--trace", tmp_path / "none").output
    bad.write_text("")
    assert run("--trace", trace, "--config", bad).exit_code == 0


def test_help_is_fast_and_the_module_is_executable() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "daskserve", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "Try autoscaling policies on a recorded load." in done.stdout
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom daskserve.cli.main import main\n"
        "CliRunner().invoke(main, ['--help'])\n"
        "print(sorted({'pydantic', 'distributed', 'tornado', 'daskserve.cli.simulate'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
