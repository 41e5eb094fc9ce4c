"""The JSON Schema accepts the files that daskserve reads, and refuses files with one mistake."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import ValidationError
from tables import each_case

from daskserve.config_file.json_schema import json_schema
from daskserve.config_file.reading import read
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.backend import BackendConfig
from daskserve.options.fields.base import names_of
from daskserve.options.http import HTTPOptions
from daskserve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

WHOLE = """
proxy_location: Disabled
http_options: {host: 0.0.0.0, port: "${PORT}", max_body_bytes: 2GB, num_cpus: 0}
grpc_options: {port: 9000, grpc_servicer_functions: []}
target_capacity: 50
applications:
- name: shop
  import_path: shop:build
  route_prefix: null
  args: {size: 3, deep: {a: [1]}}
  runtime_env: {pip: [numpy], env_vars: {A: b, SECRET: {env: NAME}}, working_dir: s3://a/b.zip}
  autoscaling_policy: {policy_function: "a:b"}
  deployments:
  - name: Model
    num_replicas: auto
    max_concurrent_queries: 7
    rolling_update_percentage: 0.5
    max_surge: "${SURGE:-25%}"
    autoscaling_config: {min_replicas: "${MIN}", max_replicas: 3}
    ray_actor_options: {num_cpus: 0.5, memory: 1GB, runtime_env: {conda: other}}
    deployment_actors: [{name: a, actor_class: "a:B"}]
    user_config: [1, {a: b}]
  - {name: Other, num_replicas: 2, logging_config: {log_level: DEBUG}}
"""


def test_a_readable_file_matches_the_schema() -> None:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    read(WHOLE)
    assert list(Draft202012Validator(schema).iter_errors(yaml.safe_load(WHOLE))) == []


@each_case(
    ("wrong", "place"),
    [
        ({}, []),
        ({"applications": [{}]}, ["applications", 0]),
        ({"applications": [{"import_path": "a:b", "nme": 3}]}, ["applications", 0]),
        ({"applications": [], "http_options": {"port": "x"}}, ["http_options", "port"]),
        ({"applications": [], "http_options": {"server": "x"}}, ["http_options", "server"]),
        ({"applications": [], "proxy_location": "All"}, ["proxy_location"]),
        ({"applications": [], "target_capacity": 101}, ["target_capacity"]),
        (
            {"applications": [{"import_path": "a:b", "deployments": [{"name": "D", "num_replicas": 0}]}]},
            ["applications", 0, "deployments", 0, "num_replicas"],
        ),
    ],
)
def test_a_wrong_file_does_not_match_the_schema(wrong: Any, place: list[Any]) -> None:
    (error,) = Draft202012Validator(json_schema()).iter_errors(wrong)
    assert list(error.absolute_path) == place


def test_every_option_is_there_with_a_description() -> None:
    schema = json_schema()["properties"]
    deployment = schema["applications"]["items"]["properties"]["deployments"]["items"]["properties"]
    for names, properties in (
        (names_of(BackendConfig), deployment),
        (names_of(HTTPOptions), schema["http_options"]["properties"]),
    ):
        for name in set(names) - {"internal_metadata"}:
            assert len(properties[name]["description"]) > 10, name
            assert "``" not in properties[name]["description"]


@each_case(
    ("model", "values", "text"),
    [
        (
            ServeDeploySchema,
            {"applications": [{"import_path": "a.b"}, {"import_path": "c:d"}]},
            "has the name",
        ),
        (ServeDeploySchema, {"applications": [{"import_path": "a.b", "port": 1}]}, "port has no counterpart"),
        (ServeApplicationSchema, {"import_path": "ab"}, "import_path must be"),
        (
            ServeApplicationSchema,
            {"import_path": "a.b", "runtime_env": {"working_dir": "."}},
            "must be a URL",
        ),
        (DeploymentSchema, {"name": "D", "num_replicas": 0}, "greater than or equal to 1"),
        (DeploymentSchema, {"num_replicas": 1}, "has no name"),
    ],
)
def test_the_classes_of_ray_serve_check_values(model: Any, values: Any, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        model.model_validate(values)


def test_the_classes_of_ray_serve_take_what_is_right() -> None:
    found = ServeDeploySchema(
        applications=[{"import_path": "a.b", "logging_config": {}, "deployments": [{"name": "D"}]}]
    )
    assert found.applications[0].deployments[0].name == "D"
    options = {"name": "D", "num_replicas": None, "health_check_period_s": None, "route_prefix": "/d"}
    assert DeploymentSchema(**options).options == {}
    scaling = {"policy": {"name": "a.b"}, "upscale_smoothing_factor": 0.5, "downscale_smoothing_factor": None}
    found_scaling = AutoscalingConfig(**scaling)
    assert (found_scaling.policy, found_scaling.upscaling_factor) == ("a.b", 0.5)
    default = {"policy": {"policy_function": "ray.serve.autoscaling_policy:default_autoscaling_policy"}}
    assert AutoscalingConfig(**default).policy == "target_ongoing_requests"
