"""A configuration file is read with all its faults at once, each at its place."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from tables import each_case

from daskserve.config_file import yaml_text
from daskserve.config_file.reading import read
from daskserve.errors import ConfigFileError

SHOP = """
applications:
- name: shop
  import_path: shop.main:app
  route_prefix: /shop
  deployments:
  - name: Model
    num_replicas: 3
    ray_actor_options: {num_cpus: 0.5}
"""
SHOP_PLAIN = {
    "applications": [
        {
            "name": "shop",
            "import_path": "shop.main:app",
            "route_prefix": "/shop",
            "deployments": [
                {"name": "Model", "num_replicas": 3, "ray_actor_options": {"num_cpus": 0.5}},
            ],
        }
    ]
}
SHOP_TOML = """
[[applications]]
name = "shop"
import_path = 'shop.main:app'
route_prefix = "/shop"

[[applications.deployments]]
name = "Model"
num_replicas = 3
ray_actor_options = { num_cpus = 0.5 }
"""


@each_case(
    ("text", "name"),
    [
        (SHOP, "serve.yaml"),
        (json.dumps(SHOP_PLAIN, indent=2), "serve.json"),
        (json.dumps(SHOP_PLAIN), "serve.yaml"),
        (SHOP_TOML, "serve.toml"),
    ],
)
def test_yaml_json_and_toml_hold_the_same(text: str, name: str) -> None:
    found = read(text, name)
    assert found.config.to_plain() == SHOP_PLAIN
    assert found.warnings == []


def faults(text: str, name: str = "f.yaml") -> list[str]:
    with pytest.raises(ConfigFileError) as caught:
        read(text, name)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value).splitlines()


def app(*lines: str, deployment: str = "") -> str:
    """Return a file with one application; the first line of ``lines`` is line 3 of the file."""
    text = "applications:\n- import_path: a:b\n" + "".join(f"  {each}\n" for each in lines)
    if deployment:
        text += "  deployments:\n  - name: D\n    " + deployment
    return text


@each_case(
    ("text", "expected"),
    [
        ("", "f.yaml:1:1: the file is empty"),
        ("[]", "f.yaml:1:1: a configuration file must be a mapping of names to values, got []"),
        ("applications: 3", "f.yaml:1:15: applications must be a list, got int"),
        ("applications:", "f.yaml:1:14: applications must be a list, got nothing; [] is an empty list"),
        ("a: [", "f.yaml:2:1: this is not YAML: did not find expected node content while parsing"),
        ("aplications: []", "f.yaml:1:1: a configuration file has no option 'aplications'; did you mean"),
        ("applications:\n- name: a", "f.yaml:2:3: the application has no import_path"),
        ("applications:\n- import_path: ab", "f.yaml:2:16: import_path must be 'module:name'"),
        ("applications:\n- import_path: a:b:c", "f.yaml:2:16: import_path must be 'module:name'"),
        ("applications:\n- import_path: ':a'", "f.yaml:2:16: import_path must be 'module:name'"),
        (
            "applications:\n- import_path: ray.serve.llm:x",
            "f.yaml:2:16: import_path 'ray.serve.llm:x' is Ray",
        ),
        (app("route_prefix: x"), "f.yaml:3:17: route_prefix must start with '/', got 'x'"),
        (app("route_prefix: ['${X}']"), "f.yaml:3:17: route_prefix must be a string or None, got ['${X}']"),
        (app("args: '${X}'"), "f.yaml:3:9: args: Input should be a valid dictionary, got '${X}'"),
        (app("autoscaling_policy: '${X}'"), "f.yaml:3:23: autoscaling_policy: Input should be a valid dict"),
        (app("external_scaler_enabled: ['${X}']"), "f.yaml:3:28: external_scaler_enabled: Input should be a"),
        ("applications:\n- import_path: ['${X}']", "f.yaml:2:16: import_path must be 'module:name' or"),
        (app("name: ''"), "f.yaml:3:9: name must not be empty"),
        (app("name: ${X}"), "f.yaml:3:9: the name of an application cannot have references"),
        (app("host: 1.2.3.4"), "f.yaml:3:3: host has no counterpart here: all applications of an instance"),
        (app("port: 8000"), "f.yaml:3:3: port has no counterpart here: all applications of an instance"),
        (app("args: 3"), "f.yaml:3:9: args: Input should be a valid dictionary, got 3"),
        (app("runtime_env: {working_dir: ./src}"), "f.yaml:3:30: working_dir must be a URL"),
        (app("runtime_env: {py_modules: [s3://a]}"), "f.yaml:3:17: py_modules has no counterpart"),
        (app("runtime_env: {env_var: {}}"), "f.yaml:3:17: runtime_env has no option 'env_var'; did you mean"),
        (app("autoscaling_policy: {}"), "f.yaml:3:23: autoscaling_policy has no policy_function"),
        (app("args: {x: &a [*a]}"), "f.yaml:3:13: this value contains itself, by an alias"),
        (app("args: {x: !!python/name:os.system ''}"), "f.yaml:3:13: '' cannot have the tag"),
        (app("args: {x: [9223372036854775808]}"), "f.yaml:3:14: 9223372036854775808 has more than 64 bits"),
        (app('name: "a\\e[1m"'), "f.yaml:3:9: name must not have control characters, got 'a\\x1b[1m'"),
        (app("args: {a: 1, a: 2}"), "f.yaml:3:16: the key 'a' is here already, in line 3"),
        (app("args: {a: !!int ''}"), "f.yaml:3:13: '' cannot have the tag !!int; leave the tag out"),
        (app(deployment="num_replica: 2"), "f.yaml:5:5: a deployment has no option 'num_replica'; did you"),
        (app(deployment="num_replicas: 0"), "f.yaml:5:19: num_replicas: Input should be greater than"),
        (app(deployment="max_surge_percent: 300"), "f.yaml:5:24: max_surge_percent is 300; give"),
        (app(deployment="version: 1"), "f.yaml:5:14: version must be text, got 1; write it in quotes"),
        (app(deployment="ray_actor_options: {cpus: 1}"), "f.yaml:5:25: ray_actor_options has no option"),
        (app(deployment="deployment_actors: [{name: a}]"), "f.yaml:5:25: actor_class is missing"),
        (app(deployment="init_args: [1]"), "f.yaml:5:5: init_args has no counterpart here: the code binds"),
        (
            app(deployment="backpressure_config: {enabled: true}"),
            "f.yaml:5:5: backpressure_config has no counterpart here",
        ),
        (
            app(deployment="autoscaling_config: {max_replica: 3}"),
            "f.yaml:5:26: AutoscalingConfig has no option 'max_replica'. Did you mean 'max_replicas'?",
        ),
        (
            app(deployment="num_replicas: 2\n    autoscaling_config: {max_replicas: 3}"),
            "f.yaml:5:19: num_replicas=2 cannot be combined with autoscaling_config",
        ),
        ("apiVersion: ray.io/v1\nkind: RayService", "f.yaml:1:1: this is a Kubernetes RayService; put the"),
        (
            "http_options: {prt: 1}\napplications: []",
            "f.yaml:1:16: http_options has no option 'prt'; did you",
        ),
        ("http_options: {port: x}\napplications: []", "f.yaml:1:22: port: Input should be a valid integer"),
        (
            "proxy_location: All\napplications: []",
            "f.yaml:1:17: proxy_location: Input should be "
            "'HeadOnly', 'EveryNode', 'EveryWorker' or 'NoServer', got 'All'",
        ),
        ("logging_config: 5\napplications: []", "f.yaml:1:17: logging_config must be a mapping"),
        (
            "logging_config: {log_level: LOUD}\n" + app(),
            "f.yaml:1:29: log_level: 'LOUD' is not a level of logging",
        ),
        (app("logging_config: {encodng: JSON}"), "f.yaml:3:20: logging_config has no option 'encodng'; did"),
        (app("logging_config: ${X}"), "f.yaml:3:19: logging_config must be a mapping"),
        (app("external_scaler_enabled: 3"), "f.yaml:3:28: external_scaler_enabled: Input should be a valid"),
        ("target_capacity: 101\napplications: []", "f.yaml:1:18: target_capacity is a percentage"),
        ("target_capacity: yes\napplications: []", "f.yaml:1:18: target_capacity is a percentage"),
        (
            "grpc_options: {grpc_servicer_functions: [a.b]}\napplications: []",
            "f.yaml:1:1: grpc_options has no",
        ),
        ("target_capacity: -1\napplications: []", "f.yaml:1:18: target_capacity is a percentage"),
        ("applications: [3]", "f.yaml:1:16: an application must be a mapping of names to values, got 3"),
        (
            "applications: [{import_path: 'a:b', deployments: [3]}]",
            "f.yaml:1:51: a deployment must be a mapping of names to values, got 3",
        ),
        (
            "applications: [{import_path: 'a:b', deployments: [{num_replicas: 2}]}]",
            "f.yaml:1:51: the deployment has no name; write that of the code",
        ),
        (
            app("external_scaler_enabled: true", deployment="num_replicas: auto"),
            "f.yaml:6:19: external_scaler_enabled is set for the application, and deployment 'D' is "
            "autoscaled by its num_replicas;",
        ),
        (
            app("external_scaler_enabled: true", deployment="autoscaling_config: {max_replicas: 3}"),
            "f.yaml:6:25: external_scaler_enabled is set for the application, and deployment 'D' is "
            "autoscaled by its autoscaling_config;",
        ),
        (
            "proxy_location: EveryNode\nhttp_options: {location: HeadOnly}\napplications: []",
            "f.yaml:1:17: proxy_location is another spelling of location in http_options",
        ),
        (app(deployment="ray_actor_options: 3"), "f.yaml:5:24: actor_options must be a mapping of names"),
        (
            app(deployment="ray_actor_options: {num_cpus: 1}\n    actor_options: {num_cpus: 1}"),
            "f.yaml:5:24: ray_actor_options is another spelling of actor_options; give only one",
        ),
        (
            app(
                deployment="deployment_actors: [{name: a, actor_class: 'm:C', actor_options: {num_cpus: x}}]"
            ),
            "f.yaml:5:81: actor_options.num_cpus: 'x' is not a number",
        ),
        (
            app(deployment="max_concurrent_queries: 0"),
            "f.yaml:5:29: max_concurrent_queries: Input should be greater than or equal to 1, got 0",
        ),
        (
            app("env: {env_vars: {A: b}}", "runtime_env: {env_vars: {A: b}}"),
            "f.yaml:4:16: runtime_env is another spelling of env; give only one",
        ),
        (app("env: 5"), "f.yaml:3:8: env must be an Environment or a dict of its options"),
        (app(deployment="env: 5"), "f.yaml:5:10: env must be an Environment or a dict of its options"),
        (app("args: {x: !foo [1]}"), "f.yaml:3:13: the tag !foo is not known here; leave it out"),
        (app("args: {x: !!int abc}"), "f.yaml:3:13: 'abc' cannot have the tag !!int; leave the tag out"),
        (app("args: {[1]: 2}"), "f.yaml:3:10: a key must be text"),
        (app("args: {<<: 3}"), "f.yaml:3:14: <<: takes a mapping, or a list of mappings"),
        (app("args: {<<: [{a: 1}, 3]}"), "f.yaml:3:23: <<: takes a mapping, or a list of mappings"),
        ("a: \x00", "f.yaml:1:1: this is not YAML: unacceptable character #x0000"),
        (
            "target_capacity: 5\napplications: []\n---\ntarget_capacity: 5\napplications: []",
            "f.yaml:4:1: another document of this file has target_capacity, too",
        ),
    ],
)
def test_one_fault_is_one_line_with_its_place(text: str, expected: str) -> None:
    (line,) = faults(text)
    assert line.startswith(expected)


@each_case(
    ("name", "text", "expected"),
    [
        ("f.json", '{"applications": [\n  {"name": 3}]}', ["f.json:2:3:", "f.json:2:12:"]),
        ("f.json", '{"applications": [],\n\t"applications": []}', ["f.json:2:2:"]),
        ("f.json", '{"applications": [}', ["f.json:1:19: this is not JSON"]),
        ("f.json", "[" * 100_000, ["f.json:1:101: this is not JSON: Values are nested deeper"]),
        ("f.json", "[" * 101 + "]" * 101, ["f.json:1:101: this is not JSON: Values are nested deeper"]),
        ("f.json", "[" * 100 + "]" * 100, ["f.json:1:1: a configuration file must be a mapping"]),
        ("f.yaml", "[" * 101 + "]" * 101, ["f.yaml:1:1:", "f.yaml:1:101: values are nested deeper"]),
        ("f.yaml", "[" * 100 + "]" * 100, ["f.yaml:1:1: a configuration file must be a mapping"]),
        ("f.json", '{"a": 1} x', ["f.json:1:10: this is not JSON: Extra data"]),
        ("f.json", '{"a" 1}', ["f.json:1:6: this is not JSON: Expecting ':' delimiter"]),
        ("f.json", '{"a": 1 "b": 2}', ["f.json:1:9: this is not JSON: Expecting ',' delimiter"]),
        ("f.json", "[1 2]", ["f.json:1:4: this is not JSON: Expecting ',' delimiter"]),
        ("f.json", "{a: 1}", ["f.json:1:2: this is not JSON: Expecting property name enclosed"]),
        ("f.json", '{"a": ' + "1" * 5000 + "}", ["f.json:1:7: this is not JSON: This number has too many"]),
        ("f.json", "", ["f.json:1:1: this is not JSON: Expecting value"]),
        ("f.yaml", "[" * 100_000, ["f.yaml:1:"]),
        ("f.toml", "applications = 3\nx = \n", ["f.toml:2:5: this is not TOML"]),
        ("f.toml", "applications = " + "9" * 5000, ["f.toml:1:5016: this is not TOML: Exceeds the limit"]),
        ("f.toml", "# c\n[[applications]]\nnme = '''a\nb'''\n", ["f.toml:2:3:", "f.toml:3:1:"]),
        (
            "f.toml",
            '[http_options]\nport = "x"\n[[applications]]\nimport_path = "a:b"\n'
            '[[applications.deployments]]\nname = "D"\nautoscaling_config = {min_replicas = 1, max = 3}\n'
            '[applications.deployments.actor_options]\n"num cpus" = [ # c\n 1, 2]',
            ["f.toml:2:8:", "f.toml:7:41:", "f.toml:9:1:"],
        ),
    ],
)
def test_places_are_right_in_each_format(name: str, text: str, expected: list[str]) -> None:
    found = faults(text, name)
    assert [line[: len(each)] for line, each in zip(found, expected, strict=True)] == expected


@each_case(
    ("text", "name", "expected"),
    [
        ("proxy_location: ${X}\napplications: []", "f.yaml", {"proxy_location": "${X}"}),
        ("target_capacity: ${X}\napplications: []", "f.yaml", {"target_capacity": "${X}"}),
        ("target_capacity: 100\napplications: []", "f.yaml", {"target_capacity": 100}),
        ("target_capacity: 0\napplications: []", "f.yaml", {"target_capacity": 0}),
        (' \n{"applications": [] }\t\n', "f.json", {"applications": []}),
        (app("env: conda-name"), "f.yaml", {"env": "conda-name"}),
        (app("runtime_env: {}", "env: {env_vars: {A: b}}"), "f.yaml", {"env": {"env_vars": {"A": "b"}}}),
        (app("args: {<<: [{a: 1}, {a: 2, b: 4}], c: 5}"), "f.yaml", {"args": {"a": 1, "b": 4, "c": 5}}),
        (
            app("external_scaler_enabled: false", deployment="num_replicas: auto"),
            "f.yaml",
            {"deployments": [{"name": "D", "num_replicas": "auto"}]},
        ),
    ],
)
def test_valid_files_are_read_as_written(text: str, name: str, expected: dict[str, Any]) -> None:
    plain: dict[str, Any] = read(text, name).config.to_plain()
    values = {**plain, **(plain["applications"][0] if plain["applications"] else {})}
    assert {key: values[key] for key in expected} == expected


def test_forty_faults_are_forty_lines_in_the_order_of_their_places() -> None:
    wrong = [
        "num_replicas: 0",
        "max_ongoing_requests: many",
        "max_queued_requests: 0",
        "health_check_period_s: -1",
        "health_check_timeout_s: x",
        "graceful_shutdown_timeout_s: -2",
        "rolling_update_percentage: 5",
        "max_replicas_per_node: 101",
        "isolation: container",
        "numreplicas: 3",
        "autoscaling_config: {min_replicas: 5, max_replicas: 2}",
        "ray_actor_options: {num_cpus: lots, num_gpu: 1}",
    ]
    blocks = [
        f"- import_path: a:b\n  name: a{number}\n  route_prefix: /{number}\n  deployments:\n  - name: D\n"
        + "".join(f"    {each}\n" for each in wrong)
        for number in range(3)
    ]
    found = faults("proxy_location: Nowhere\napplications:\n" + "".join(blocks))
    assert len(found) == 40
    lines = [int(line.split(":")[1]) for line in found]
    assert lines == sorted(lines)
    assert lines[:3] == [1, 8, 9]


def test_two_applications_cannot_share_a_name_or_a_route() -> None:
    found = faults("applications:\n" + "- import_path: a:b\n" * 2)
    assert found == [
        "f.yaml:3:3: another application has the name 'default', in line 2",
        "f.yaml:3:3: application 'default' has the route_prefix '/' already, in line 2",
    ]


def test_options_without_an_effect_log_warnings() -> None:
    text = """
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: 8000, num_cpus: 0}
grpc_options: {port: 9000, grpc_servicer_functions: []}
logging_config: {encoding: JSON}
applications:
- import_path: a:b
  runtime_env: {config: {setup_timeout_seconds: 3}, env_vars: {A: b}}
  deployments:
  - {name: D, logging_config: {}, route_prefix: null, ray_actor_options: {object_store_memory: 1}}
"""
    found = read(text)
    assert [each.split(" is not used")[0] for each in found.warnings] == [
        "serve.yaml:3:43: num_cpus",
        "serve.yaml:4:1: grpc_options",
        "serve.yaml:8:17: config",
        "serve.yaml:10:35: route_prefix",
        "serve.yaml:10:75: object_store_memory",
    ]
    plain: dict[str, Any] = found.config.to_plain()
    assert plain["applications"][0]["env"] == {"env_vars": {"A": "b"}}
    (deployment,) = plain["applications"][0]["deployments"]
    assert deployment == {"name": "D", "logging_config": {}, "ray_actor_options": {}}


def test_several_documents_are_one_file() -> None:
    text = (
        "import_path: a:b\nname: a\nroute_prefix: /a\n---\nimport_path: c:d\nname: c\nroute_prefix: /c\n---\n"
    )
    found = read(text).config
    assert [each.name for each in found.applications] == ["a", "c"]
    assert faults(text + "name: a\nimport_path: a:b\nroute_prefix: /x") == [
        "f.yaml:9:7: another application has the name 'a', in line 2"
    ]


def test_anchors_and_merged_mappings_keep_their_places() -> None:
    text = """
shared: &shared {num_replicas: 2, health_check_period_s: 0}
applications:
- import_path: a:b
  deployments:
  - {name: A, <<: *shared}
  - {name: B, <<: *shared, health_check_period_s: 1}
"""
    found = faults(text)
    assert [each.partition(": ")[0] for each in found] == ["f.yaml:2:1", "f.yaml:2:58"]


def test_aliases_do_not_grow_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_text, "MAX_VALUES", 1000)
    levels = "".join(f"l{n + 1}: &l{n + 1} [{', '.join([f'*l{n}'] * 10)}]\n" for n in range(9))
    (line, *_) = [each for each in faults("l0: &l0 [x]\n" + levels) if "aliases" in each]
    assert "more than 1000 values" in line


def test_text_that_resembles_a_reference_logs_a_warning() -> None:
    text = "args: {a: '${env:FOO} x', b: '${', c: '$${x}', d: 'ok ${FOO:-x} ${A-b}'}"
    found = read(f"applications: [{{import_path: 'a:b', {text}}}]", "f.yaml")
    assert [each.split(" stays as it is")[0].split(": ")[1] for each in found.warnings] == [
        "'${env:FOO}'",
        "'${'",
        "'${A-b}'",
    ]


@each_case(
    "lines",
    [
        "http_options: {trusted_forwarders: ['${NET}']}",
        "http_options: {ssl_certfile: '${CERT}', ssl_keyfile: /key}",
        "autoscaling_config: {policy: promql, prometheus_address: '${P}', prometheus_queries: {a: x}}",
        "autoscaling_config: {min_replicas: 3, max_replicas: '${MOST}'}",
        "placement_group_bundles: [{CPU: '${CPUS}'}]",
        "rollout: {steps: ['${FIRST}', '100%']}",
        "rollout: {gates: [{metric: prometheus, query: x, prometheus_address: '${P}'}]}",
        "model_repository: {url: '${FOLDER}'}",
        "gang_scheduling_config: {gang_size: '${SIZE}'}\n    num_replicas: 4",
        "payload_logging: {sink: '${FOLDER}', max_bytes: 10}",
        "deployment_actors: [{name: a, actor_class: '${CLASS}'}]",
    ],
)
def test_options_that_need_a_value_of_a_variable_are_no_fault(lines: str) -> None:
    is_of_instance = lines.startswith("http_options")
    assert read(f"{lines}\n{app()}" if is_of_instance else app(deployment=lines)).warnings == []


def test_other_faults_beside_a_value_of_a_variable_are_found() -> None:
    assert faults(app(deployment="payload_logging: {sink: '${FOLDER}', max_bytes: 0}")) == [
        "f.yaml:5:53: payload_logging.max_bytes: Input should be greater than or equal to 1, got 0"
    ]
