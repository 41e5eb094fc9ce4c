"""Each kind of file in Ray Serve's documentation is built, or the error names what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ray_files import KINDS
from tables import each_case

from daskserve.client.hosting.building import build_configured
from daskserve.config_file.model import ApplicationConfig
from daskserve.config_file.reading import read
from daskserve.errors import ConfigFileError

PAGE = (Path(__file__).parents[2] / "docs/migrating.md").read_text()
READ = {name: kind for name, kind in KINDS.items() if not kind.lacks}


@each_case("name", READ)
def test_each_kind_that_deploys_is_built_and_warns_of_what_it_does_not_use(name: str) -> None:
    kind = READ[name]
    found = read(kind.text, f"{name}.yaml")
    ignored = [re.sub(r"^.*:\d+:\d+: (\w+) is not used.*", r"\1", each) for each in found.warnings]
    assert tuple(ignored) == kind.ignored
    for each in found.config.to_plain()["applications"]:
        application = ApplicationConfig(**each)
        if application.name in kind.fails and not kind.answers:
            with pytest.raises(Exception, match=kind.fails[application.name]):
                build_configured(application)
        else:
            assert build_configured(application).spec.deployments


@each_case("name", KINDS.keys() - READ.keys())
def test_each_other_kind_has_a_line_for_all_that_it_lacks(name: str) -> None:
    kind = KINDS[name]
    with pytest.raises(ConfigFileError) as caught:
        read(kind.text, f"{name}.yaml")
    lines = str(caught.value).splitlines()
    assert len(lines) == len(kind.lacks)
    for line, text in zip(lines, kind.lacks, strict=True):
        assert re.match(rf"{name}\.yaml:\d+:\d+: .*{re.escape(text)}", line)


def test_the_documentation_says_what_happens_with_each_kind() -> None:
    rows = re.findall(r"^\| (.*?) \| (deploys|refused).*\|$", PAGE, re.MULTILINE)
    assert rows == [(kind.what, "refused" if kind.lacks else "deploys") for kind in KINDS.values()]
