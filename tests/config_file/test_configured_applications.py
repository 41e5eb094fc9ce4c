"""The options of a file over those of the code: what is built, and what is refused."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import dask
import pytest
from tables import each_case

from daskserve.client.hosting.building import build_configured
from daskserve.config_file.model import ApplicationConfig
from daskserve.config_file.reading import read
from daskserve.errors import BadRequestError, ConfigFileError, ReplicaStartError
from daskserve.internals.cloudpickle import release_class_ids
from daskserve.options.backend import BackendConfig
from daskserve.options.environment import Environment
from daskserve.options.specs import BackendSpec
from daskserve.payload.importing import forget
from daskserve.payload.parcels import unpack_code

MODULE = """
import daskserve as serve

@serve.deployment(num_replicas=2, user_config={"a": 1}, ray_actor_options={"num_cpus": 0.5})
class Model:
    def __init__(self, *args): ...
    def __call__(self): ...

@serve.deployment(autoscaling_config={"min_replicas": 1, "max_replicas": 4}, env={"env_vars": {"A": "code"}})
class Front:
    def __init__(self, *args): ...
    def __call__(self): ...

def build(args):
    return Front.bind(Model.bind(args), Model.bind(args))

app = build({})

def fail(args):
    raise ValueError("of the user")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configured.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("configured", "helping"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def application(text: str) -> ApplicationConfig:
    """Return the application of a file, as the controller gets it."""
    plain = read("applications:\n- import_path: configured:app\n" + text).config.to_plain()
    return ApplicationConfig(**plain["applications"][0])


def built(text: str) -> dict[str, BackendSpec]:
    return {each.name: each.spec for each in build_configured(application(text)).spec.deployments}


def overrides(name: str, *options: str) -> str:
    return f"  deployments:\n  - name: {name}\n" + "".join(f"    {each}\n" for each in options)


def test_options_of_the_file_win_one_by_one_and_the_code_has_the_others() -> None:
    code = built("")
    assert list(code) == ["Model", "Model_1", "Front"]
    spec = built(overrides("Model_1", "num_replicas: 3", "graceful_shutdown_timeout_s: 7"))["Model_1"]
    assert (spec.config.num_replicas, spec.actor_options.num_cpus) == (3, 0.5)
    assert spec.config.experimental_graceful_shutdown_timeout_s == 7
    assert spec.user_config == code["Model_1"].user_config
    assert spec.version == code["Model_1"].version
    # An option that is no longer in the file has the code's value again.
    assert built(overrides("Model_1", "graceful_shutdown_timeout_s: 7"))["Model_1"].config.num_replicas == 2


def config(text: str, name: str = "Front") -> BackendConfig:
    return built(text)[name].config


def test_each_kind_of_option_can_be_given() -> None:
    assert config(overrides("Front", "num_replicas: 3")).autoscaling_config is None
    scaled = config(overrides("Model", "num_replicas: auto"), "Model").autoscaling_config
    assert scaled is not None
    assert scaled.max_replicas == 100
    spec = built(overrides("Model", "ray_actor_options: {num_gpus: 1, runtime_env: {env_vars: {B: b}}}"))[
        "Model"
    ]
    assert (spec.actor_options.num_gpus, spec.actor_options.num_cpus) == (1, 0.1)
    assert spec.env is not None
    assert Environment.from_text(spec.env).env_vars == {"B": "b"}
    assert built(overrides("Model", "version: v7"))["Model"].user_version == "v7"
    assert config(
        "  external_scaler_enabled: true\n" + overrides("Front", "num_replicas: 1")
    ).external_scaler_enabled
    policy = "  autoscaling_policy: {policy_function: 'a:b', policy_kwargs: {c: 1}}\n"
    found = config(policy).autoscaling_config
    assert found is not None
    assert (found.policy, found.policy_kwargs, found.group) == ("a:b", {"c": 1}, "default")
    assert config(policy, "Model").autoscaling_config is None


def test_an_environment_of_the_application_is_below_those_of_its_deployments() -> None:
    app_env = "  runtime_env: {env_vars: {A: app, C: app}, pip: [numpy]}\n"

    def env(text: str, name: str) -> Environment:
        spec = built(app_env + text)[name]
        assert spec.env is not None
        return Environment.from_text(spec.env)

    assert env("", "Model").env_vars == {"A": "app", "C": "app"}
    assert env("", "Front").env_vars == {"A": "code", "C": "app"}
    found = env(overrides("Front", "runtime_env: {conda: other, env_vars: {A: file}}"), "Front")
    assert (found.env_vars, found.python, found.packages) == ({"A": "file", "C": "app"}, "other", [])


def test_references_are_resolved_where_the_application_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICAS", "4")
    monkeypatch.setenv("SIZE", "0.25")
    monkeypatch.setenv("ROUTE", "shop")
    text = "  route_prefix: /${ROUTE}\n" + overrides(
        "Model",
        "num_replicas: ${REPLICAS}",
        "max_surge: ${SURGE:-25%}",
        "actor_options: {num_cpus: '${SIZE}'}",
        "user_config: {password: '${SIZE}', price: '$${SIZE}'}",
    )
    found = application(text)
    assert "${REPLICAS}" in str(found.to_plain())
    made = build_configured(found).spec
    spec = made.deployments[0].spec
    assert (made.route, spec.config.num_replicas, spec.actor_options.num_cpus) == ("/shop", 4, 0.25)
    assert spec.config.max_surge == "25%"
    assert spec.user_config is not None
    assert b"0.25" in spec.user_config
    assert b"${SIZE}" in spec.user_config


def test_a_missing_variable_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    text = "  runtime_env: {env_vars: {A: '${NOWHERE}'}}\n" + overrides("Model", "num_replicas: ${NOWHERE}")
    with pytest.raises(ConfigFileError) as caught:
        build_configured(application(text))
    lines = str(caught.value).splitlines()
    assert [each.partition(": ")[0] for each in lines] == ["serve.yaml:3:31", "serve.yaml:6:19"]
    assert "there is no environment variable 'NOWHERE'" in lines[0]


def test_options_of_an_application_may_be_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "  external_scaler_enabled: ${SCALED}\n  logging_config: {log_level: '${LEVEL}'}\n"
    text += overrides("Front", "autoscaling_config: null\n    num_replicas: 1")
    monkeypatch.setenv("SCALED", "true")
    monkeypatch.setenv("LEVEL", "DEBUG")
    config = built(text)["Model"].config
    assert config.external_scaler_enabled is True
    assert config.logging_config is not None
    assert config.logging_config.log_level == "DEBUG"
    monkeypatch.setenv("LEVEL", "LOUD")
    with pytest.raises(ConfigFileError, match="log_level: 'LOUD' is not a level of logging"):
        built(text)


@each_case(
    ("text", "kind", "expected"),
    [
        (
            overrides("Modell", "num_replicas: 3"),
            BadRequestError,
            "it has 'Model', 'Model_1', 'Front'. Did you",
        ),
        (
            overrides("Front", "external_scaler_enabled: true"),
            BadRequestError,
            "deployment 'Front' of application",
        ),
        ("  args: {a: 1}\n", BadRequestError, "is already built, so it takes no arguments"),
    ],
)
def test_options_that_do_not_fit_the_code_are_refused(
    text: str, kind: type[Exception], expected: str
) -> None:
    with pytest.raises(kind) as caught:
        built(text)
    assert expected in str(caught.value)


def test_an_error_of_a_builder_is_the_users() -> None:
    values: dict[str, Any] = {"import_path": "configured:fail", "args": {"a": 1}}
    with pytest.raises(ReplicaStartError) as caught:
        build_configured(ApplicationConfig(**values))
    assert "ValueError: of the user" in caught.value.user_traceback


def version_of(name: str, text: str = "") -> str | None:
    return built(text)[name].version


def test_a_changed_file_is_imported_again_and_is_another_version_of_what_uses_it(folder: Path) -> None:
    (folder / "helping.py").write_text("VALUE = 1\ndef helped(): return VALUE\n")
    (folder / "configured.py").write_text(
        "import daskserve as serve, helping\n"
        "@serve.deployment\nclass Whole:\n    def __call__(self): return 1\n"
        "@serve.deployment\nclass Model:\n    def __init__(self, whole): ...\n"
        "    def __call__(self): return helping.helped()\n"
        "app = Model.bind(Whole.bind())\n"
    )
    first, whole = version_of("Model"), version_of("Whole")
    assert (version_of("Model"), version_of("Whole")) == (first, whole)
    (folder / "helping.py").write_text("VALUE = 2\ndef helped(): return VALUE\n")
    code = built("")["Model"].code
    assert version_of("Model") != first
    assert version_of("Whole") == whole
    # A process that has imported the old module imports the new one.
    sys.modules["helping"].VALUE = 1  # type: ignore[attr-defined]
    vars(sys.modules["helping"])["__daskserve_digest__"] = "old"
    *_, definition, _, _ = unpack_code(code, ())
    assert definition.__call__(None) == 2
    # A file that cannot be imported leaves the old modules.
    (folder / "helping.py").write_text("VALUE = = 3\n")
    with pytest.raises(ReplicaStartError, match="SyntaxError"):
        built("")
    assert sys.modules["helping"].VALUE == 2  # type: ignore[attr-defined]


def test_code_can_be_in_the_files_of_the_environment(folder: Path) -> None:
    """Also in the only folder of an archive, as GitHub creates archives."""
    with dask.config.set({"daskserve.process.environments-folder": str(folder / "cache")}):
        with zipfile.ZipFile(folder / "project.zip", "w") as archive:
            code = MODULE.replace("num_replicas=2", "num_replicas=5")
            # Some modules remove the folder of a script from the path.
            archive.writestr("shop-main/shop/inside.py", f"import sys\nsys.path.pop(0)\n{code}")
        plain = read(
            f"applications:\n- import_path: shop.inside:app\n"
            f"  runtime_env: {{working_dir: 'file://{folder}/project.zip'}}\n"
        ).config.to_plain()
        config = ApplicationConfig(**plain["applications"][0])
        spec = build_configured(config).spec
        assert spec.deployments[0].spec.config.num_replicas == 5
        assert spec.deployments[0].spec.config.isolation == "process"
        assert [each.spec.version for each in build_configured(config).spec.deployments] == [
            each.spec.version for each in spec.deployments
        ]
    assert [each for each in sys.modules if each.partition(".")[0] == "shop"] == []
    assert [each for each in sys.path if "cache" in each] == []


def test_a_version_does_not_depend_on_what_the_process_built_first() -> None:
    def versions(*sizes: int) -> dict[int, list[str | None]]:
        release_class_ids(forget(["configured"]))
        found = {}
        for size in sizes:
            config = ApplicationConfig(import_path="configured:build", args={"size": size})
            spec = build_configured(config).spec
            found[size] = [each.spec.version for each in spec.deployments]
        return found

    assert versions(1, 2) == versions(2, 1)


ROUTED = """
import daskserve as serve
from fastapi import FastAPI

app = FastAPI()

@serve.deployment
@serve.ingress(app)
class Routed:
    @app.get("/")
    def root(self): ...

entry = Routed.bind()
"""


def test_a_version_does_not_depend_on_replicas_of_the_process(folder: Path) -> None:
    """Loading the code of a replica changes the class that the process has imported."""
    (folder / "routed.py").write_text(ROUTED)
    config = application("").model_copy(update={"import_path": "routed:entry"})
    (first,) = build_configured(config).spec.deployments
    replica = unpack_code(first.spec.code, first.spec.parts)
    (second,) = build_configured(config).spec.deployments
    assert replica[0].__daskserve_app__ is not sys.modules["routed"].app
    assert second.spec.version == first.spec.version
    release_class_ids(forget(["routed"]))


USING = """
import daskserve as serve
import helping

@serve.deployment
class Using:
    def __call__(self):
        return helping.answer()

app = Using.bind()
"""


def test_the_version_does_not_depend_on_applications_that_were_built_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has imported another application must not replace the replicas of this one."""
    (folder / "helping.py").write_text("def answer(): ...")
    for name in ("using", "using_too"):
        (folder / f"{name}.py").write_text(USING)
        monkeypatch.delitem(sys.modules, name, raising=False)

    def version(path: str) -> str:
        (whole,) = build_configured(application("").model_copy(update={"import_path": path})).spec.deployments
        return whole.spec.version

    first = version("using:app")
    version("using_too:app")
    assert version("using:app") == first
    (folder / "helping.py").write_text("def answer(): return 1")
    assert version("using:app") != first
    forget(["using", "using_too"])
