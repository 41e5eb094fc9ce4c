"""The checks of a configuration file: all errors and warnings, each with its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daskserve.common.types import DEFAULT_APPLICATION, split_import_path
from daskserve.config_file import ray_keys
from daskserve.config_file.model import ApplicationConfig, InstanceConfig
from daskserve.config_file.option_checks import faults_of, names, nearest, shortened, without_nulls
from daskserve.config_file.places import Document, Faults, Path, Place
from daskserve.config_file.ray_keys import RayKey
from daskserve.config_file.references import has_references, references_in, slashed
from daskserve.options.actor import ActorOptions
from daskserve.options.autoscaling import BUILT_IN_POLICIES, RAY_DEFAULT_POLICIES
from daskserve.options.backend import BackendConfig
from daskserve.options.deployment_actor import DeploymentActorConfig
from daskserve.options.environment import Environment
from daskserve.options.fields.base import Options, names_of
from daskserve.options.http import HTTPOptions
from daskserve.options.logging import LoggingConfig
from daskserve.options.routing.route_variables import check_part_name, check_route, shape_of
from daskserve.options.tracing import TracingConfig

#: Options of a deployment that are not in its `BackendConfig`.
ACTOR_NAMES: Sequence[str] = ("actor_options", "ray_actor_options")
ENV_NAMES: Sequence[str] = ("env", "runtime_env")
OTHER_NAMES: Sequence[str] = (*ACTOR_NAMES, *ENV_NAMES, "version", "deployment_actors")
INTERNAL = frozenset({"internal_metadata", "references"})


def known_names(model: type[Options]) -> list[str]:
    """Return the names of a model's options that a file may have."""
    return [name for name in names_of(model) if name not in INTERNAL]


#: The option names that a deployment override may have.
DEPLOYMENT_NAMES: Sequence[str] = ("name", *known_names(BackendConfig), *OTHER_NAMES)


class Checks:
    """Checks the documents of a file, and returns the values that daskserve reads."""

    def __init__(self, document: Document, faults: Faults) -> None:
        self._document = document
        self._faults = faults
        self._names: dict[str, Place] = {}
        self._routes: dict[str, tuple[str, Place]] = {}

    def instance(self, value: Any, path: Path) -> dict[str, Any]:
        """Check a whole file."""
        if not self._is_mapping(value, path, "a configuration file"):
            return {}
        if "kind" in value and "apiVersion" in value:
            has_part = value["kind"] == "RayService"
            what = "put the text of its serveConfigV2 into a file" if has_part else "it has no applications"
            self._fault(path, f"this is a Kubernetes {value['kind']}; {what}")
            return {}
        if "import_path" in value and "applications" not in value:
            return {"applications": [self.application(value, path)]}
        found = self._known(
            value, path, known_names(InstanceConfig), ray_keys.INSTANCE, "a configuration file"
        )
        if "applications" not in value and not nearest("applications", list(value)):
            self._fault(path, "there are no applications: the key 'applications' is missing")
        applications = found.pop("applications", None)
        if "applications" in value:
            where = (*path, "applications")
            found["applications"] = self._each(applications, where, self.application, "applications")
        self._http(found, path)
        self._part(found, "tracing_config", TracingConfig, {}, path)
        self._part(found, "logging_config", LoggingConfig, {}, path)
        capacity = found.get("target_capacity")
        if capacity is not None and not has_references(capacity):
            is_number = isinstance(capacity, (int, float)) and not isinstance(capacity, bool)
            if not is_number or not 0 <= capacity <= 100:
                where = (*path, "target_capacity")
                self._fault(where, f"target_capacity is a percentage from 0 to 100, got {capacity!r}")
        return found

    def application(self, value: Any, path: Path) -> dict[str, Any]:
        """Check one application."""
        if not self._is_mapping(value, path, "an application"):
            return {}
        found = self._known(
            value, path, known_names(ApplicationConfig), ray_keys.APPLICATION, "an application"
        )
        deployments = found.pop("deployments", None)
        self._replace_env(found, path)
        self._import_path(found, path)
        self._name(found.get("name", DEFAULT_APPLICATION), path)
        self._route(found, path)
        apart = ("name", "import_path", "route_prefix", "logging_config", "external_scaler_enabled")
        plain = {name: each for name, each in found.items() if name not in apart}
        self._options(ApplicationConfig, {**plain, "import_path": "a:b"}, path, are_written=True)
        scaled = found.get("external_scaler_enabled", False)
        if not (isinstance(scaled, str) and has_references(scaled)):
            self._options(BackendConfig, {"external_scaler_enabled": scaled}, path, are_written=True)
        self._part(found, "logging_config", LoggingConfig, {}, path)
        self._policy(found.get("autoscaling_policy"), (*path, "autoscaling_policy"))
        if deployments is not None:
            others: dict[str, Place] = {}
            is_scaled = found.get("external_scaler_enabled") is True

            def one(each: Any, where: Path) -> dict[str, Any]:
                if is_scaled:
                    self._scales_alone(each, where)
                return self.deployment(each, where, others)

            found["deployments"] = self._each(deployments, (*path, "deployments"), one, "deployments")
        return found

    def deployment(self, value: Any, path: Path, others: dict[str, Place] | None = None) -> dict[str, Any]:
        """Check the options of one deployment; ``others`` are the names of the application's other
        deployments."""
        if not self._is_mapping(value, path, "a deployment"):
            return {}
        found = self._known(value, path, DEPLOYMENT_NAMES, ray_keys.DEPLOYMENT, "a deployment")
        found = without_nulls(BackendConfig, found)
        if "name" not in value:
            self._fault(path, "the deployment has no name; write that of the code")
        else:
            self._unique(value["name"], (*path, "name"), {} if others is None else others, "deployment")
        backend = {name: each for name, each in found.items() if name not in ("name", *OTHER_NAMES)}
        self._options(BackendConfig, backend, path)
        self._rays_policy(backend.get("autoscaling_config"), (*path, "autoscaling_config"))
        for name in ACTOR_NAMES:
            if found.get(name) is not None:
                found[name] = self._actor_options(found[name], (*path, name))
        if all(name in found for name in ACTOR_NAMES):
            self._fault(
                (*path, ACTOR_NAMES[1]),
                "ray_actor_options is another spelling of actor_options; give only one",
            )
        self._replace_env(found, path)
        if not isinstance(found.get("version", ""), (str, type(None))):
            self._fault(
                (*path, "version"), f"version must be text, got {found['version']!r}; write it in quotes"
            )
        self._actors(found, path)
        return found

    # ---- parts of an instance and an application

    def _part(
        self,
        found: dict[str, Any],
        name: str,
        model: type[Options],
        theirs: Mapping[str, RayKey],
        path: Path,
    ) -> None:
        """Check the options under a key, and remove from ``found`` those that daskserve does not read."""
        where, options = (*path, name), found.pop(name, None)
        if options is not None and self._is_mapping(options, where, name):
            options = without_nulls(model, self._known(options, where, known_names(model), theirs, name))
            self._options(model, options, where)
            found[name] = options

    def _scales_alone(self, deployment: Any, path: Path) -> None:
        """Report a deployment with autoscaling in an application that is scaled externally."""
        values = deployment if isinstance(deployment, Mapping) else {}
        is_auto = values.get("num_replicas") == "auto"
        if is_auto or values.get("autoscaling_config") is not None:
            name = "num_replicas" if is_auto else "autoscaling_config"
            self._fault(
                (*path, name),
                f"external_scaler_enabled is set for the application, and deployment {values.get('name')!r} "
                f"is autoscaled by its {name}; only one of them can set the number of replicas",
            )

    def _http(self, found: dict[str, Any], path: Path) -> None:
        self._part(found, "http_options", HTTPOptions, ray_keys.HTTP, path)
        location = found.get("proxy_location")
        if location is None:
            return
        if "location" in found.get("http_options", {}):
            self._fault(
                (*path, "proxy_location"), "proxy_location is another spelling of location in http_options"
            )
        if not has_references(location):
            for _, text in faults_of(HTTPOptions, {"location": location}):
                self._fault((*path, "proxy_location"), f"proxy_location: {text}")

    def _import_path(self, found: Mapping[str, Any], path: Path) -> None:
        where = (*path, "import_path")
        if "import_path" not in found:
            self._fault(path, "the application has no import_path")
            return
        value = found["import_path"]
        if isinstance(value, str) and has_references(value):
            return
        if not isinstance(value, str) or not all(split_import_path(value)):
            self._fault(
                where,
                f"import_path must be 'module:name' or 'module.name', with names of Python, got {value!r}",
            )
        elif value.startswith(("ray.", "ray:")):
            self._fault(
                where, f"import_path {value!r} is Ray Serve's own code; name an application of your own"
            )

    def _name(self, name: Any, path: Path) -> None:
        where = (*path, "name")
        if has_references(name):
            self._fault(
                where,
                ("the name of an application cannot have references, because it identifies the application"),
            )
            return
        self._unique(name, where, self._names, "application")

    def _unique(self, name: Any, path: Path, others: dict[str, Place], what: str) -> None:
        try:
            check_part_name(name, "name")
        except (TypeError, ValueError) as error:
            self._fault(path, str(error))
            return
        if name in others:
            self._fault(path, f"another {what} has the name {name!r}, in line {others[name].line}")
        else:
            others[name] = self._document.at(path)

    def _route(self, found: Mapping[str, Any], path: Path) -> None:
        where, route = (*path, "route_prefix"), found.get("route_prefix", "/")
        if route is None or (isinstance(route, str) and has_references(route)):
            return
        try:
            check_route(route)
        except (TypeError, ValueError) as error:
            self._fault(where, str(error))
            return
        name, place = found.get("name", DEFAULT_APPLICATION), self._document.at(where)
        if shape_of(route) in self._routes:
            other, first = self._routes[shape_of(route)]
            self._fault(
                where, f"application {other!r} has the route_prefix {route!r} already, in line {first.line}"
            )
        else:
            self._routes[shape_of(route)] = (name, place)

    def _policy(self, value: Any, path: Path) -> None:
        if not isinstance(value, Mapping):
            return
        known = ["policy_function", "policy_kwargs"]
        self._known(value, path, known, {}, "autoscaling_policy")
        if "policy_function" not in value:
            self._fault(path, "autoscaling_policy has no policy_function, the import path of a function")
        self._rays_policy({"policy": value}, path[:-1])

    def _rays_policy(self, config: Any, path: Path) -> None:
        """Report a policy of Ray Serve's own modules, except its default policy."""
        policy = config.get("policy") if isinstance(config, Mapping) else None
        name = policy.get("policy_function", policy.get("name")) if isinstance(policy, Mapping) else policy
        if isinstance(name, str) and name.startswith("ray.") and name not in RAY_DEFAULT_POLICIES:
            place = (
                (*path, "policy") if self._document.has((*path, "policy")) else (*path, "autoscaling_policy")
            )
            self._fault(
                place, f"policy {name!r} is Ray Serve's own code; use one of {', '.join(BUILT_IN_POLICIES)}"
            )

    # ---- parts of a deployment

    def _actor_options(self, value: Any, path: Path) -> Any:
        if not self._is_mapping(value, path, "actor_options"):
            return value
        found = self._known(
            value, path, [*known_names(ActorOptions), "runtime_env"], ray_keys.ACTOR, path[-1]
        )
        env = self._env({"runtime_env": found.pop("runtime_env", None)}, path)
        self._options(ActorOptions, found, path)
        return found if env is None else {**found, "runtime_env": env}

    def _replace_env(self, found: dict[str, Any], path: Path) -> None:
        """Check an environment under either of its keys; replace it with the options that daskserve reads."""
        env = self._env(found, path)
        for name in ENV_NAMES:
            found.pop(name, None)
        if env is not None:
            found["env"] = env

    def _env(self, values: Mapping[str, Any], path: Path) -> Any:
        """Check an environment and return the options that daskserve reads; None if there is none."""
        given = [name for name in ENV_NAMES if values.get(name) not in (None, {})]
        if not given:
            return None
        where = (*path, given[-1])
        if len(given) > 1:
            self._fault(where, "runtime_env is another spelling of env; give only one")
        value = values[given[-1]]
        if not isinstance(value, Mapping):
            self._options(Environment, {"python": value}, where)
            return value
        found = self._known(value, where, known_names(Environment), ray_keys.ENVIRONMENT, given[-1])
        options = dict(found)
        for name in ("packages", "pip", "uv"):
            # The file would be read on the worker that builds the application.
            if isinstance(file := found.get(name), str) and not has_references(options.pop(name)):
                self._fault((*where, name), f"{name} must be a list of requirements, got the file {file!r}")
        self._options(Environment, options, where)
        if given[-1] != ENV_NAMES[0]:
            for inside, _ in references_in(found):  # the key has been renamed
                self._document.put((*path, ENV_NAMES[0], *inside), self._document.at((*where, *inside)))
        folder = found.get("working_dir")
        if isinstance(folder, str) and not has_references(folder) and "://" not in folder:
            self._fault(
                (*where, "working_dir"),
                f"working_dir must be a URL, such as https://... or s3://..., or local:///path for a path on "
                f"the workers, got {folder!r}",
            )
        return found or None

    def _actors(self, found: Mapping[str, Any], path: Path) -> None:
        actors = found.get("deployment_actors")
        if actors is None:
            return
        others: dict[str, Place] = {}

        def one(each: Any, where: Path) -> None:
            if self._is_mapping(each, where, "an actor of a deployment"):
                known = self._known(
                    each, where, known_names(DeploymentActorConfig), {}, "an actor of a deployment"
                )
                self._options(DeploymentActorConfig, known, where)
                if "name" in each:
                    self._unique(each["name"], (*where, "name"), others, "actor")

        self._each(actors, (*path, "deployment_actors"), one, "deployment_actors")

    # ---- used by all parts

    def _each(self, value: Any, path: Path, check: Callable[[Any, Path], Any], what: str) -> list[Any]:
        if not isinstance(value, list):
            got = "nothing; [] is an empty list" if value is None else type(value).__name__
            self._fault(path, f"{what} must be a list, got {got}")
            return []
        return [check(each, (*path, index)) for index, each in enumerate(value)]

    def _is_mapping(self, value: Any, path: Path, what: str) -> bool:
        if isinstance(value, Mapping):
            return True
        got = "nothing" if value is None else shortened(value)
        self._fault(path, f"{what} must be a mapping of names to values, got {got}")
        return False

    def _known(
        self,
        values: Mapping[str, Any],
        path: Path,
        known: Sequence[str],
        theirs: Mapping[str, RayKey],
        what: Any,
    ) -> dict[str, Any]:
        """Return the values whose keys are known; report the others."""
        found = {}
        for name, value in values.items():
            place = self._document.key_at((*path, name))
            if name in theirs and theirs[name].is_harmless(value):
                self._faults.warn(place, f"{name} is not used: {theirs[name].text}")
            elif name in theirs:
                self._faults.add(place, f"{name} has no counterpart here: {theirs[name].text}")
            elif name in known:
                found[name] = value
            else:
                self._faults.add(place, f"{what} has no option {name!r}{nearest(name, known)}")
        return found

    def _options(
        self, model: type[Options], values: Mapping[str, Any], path: Path, *, are_written: bool = False
    ) -> None:
        for where, text in faults_of(model, values, are_written=are_written):
            place = self._document.key_at if " has no option " in text else self._document.at
            named = text if names(text, where) else f"{'.'.join(map(str, where))}: {text}"
            self._faults.add(place((*path, *where)), named)

    def _fault(self, path: Path, text: str) -> None:
        self._faults.add(self._document.at(path), text)


def places_of_references(value: Any, path: Path, document: Document, name: str) -> dict[str, str]:
    """Return the places of the references in a value, such as ``serve.yaml:12:7``, by `slashed` path."""
    found = {}
    for where, _ in references_in(value):
        place = document.at((*path, *where))
        found[slashed(where)] = f"{name}:{place.line}:{place.column}"
    return found
