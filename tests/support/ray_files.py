"""Configuration files like those in Ray Serve's documentation and tests, and the required results.

The programs are those of `ray_programs`. Names, options and their spellings are Ray Serve's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import dedent, indent
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes
    ----------
    what : str
        The topic of the file, as in the table of the documentation.
    text : str
        The file.
    answers : mapping
        By path: the request body (None: a GET), and the answer.
    lacks : sequence of str
        A part of each error message; with errors, the file is not deployed.
    ignored : sequence of str
        Keys that cause a warning.
    fails : mapping
        By application: a part of its status after a failed build; the other applications run.
    """

    what: str
    text: str
    answers: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    fails: Mapping[str, str] = field(default_factory=dict)


def _file(applications: str, first: str = "") -> str:
    return f"{dedent(first)}applications:\n{indent(dedent(applications).strip(), '  ')}\n"


KINDS: Mapping[str, Kind] = {
    "hello": Kind(
        "one deployment, of a tutorial",
        _file("- import_path: ray_programs:hello_app"),
        {"/": (None, "hello")},
    ),
    "text_ml": Kind(
        "what `serve build` writes: all options of two deployments",
        _file(
            """
            - name: text_ml_app
              route_prefix: /text
              import_path: ray_programs.text_app
              runtime_env: {}
              deployments:
              - name: Translator
                num_replicas: 1
                max_ongoing_requests: 5
                max_queued_requests: -1
                user_config:
                  language: french
                graceful_shutdown_wait_loop_s: 2.0
                graceful_shutdown_timeout_s: 20.0
                health_check_period_s: 10.0
                health_check_timeout_s: 30.0
                ray_actor_options:
                  num_cpus: 0.2
                  num_gpus: 0.0
              - name: Summarizer
                num_replicas: 1
                ray_actor_options:
                  runtime_env: {}
                  num_cpus: 0.2
            """,
            """
            proxy_location: EveryNode
            http_options:
              host: 0.0.0.0
              port: 8000
            grpc_options:
              port: 9000
              grpc_servicer_functions: []
            logging_config:
              encoding: TEXT
              log_level: INFO
              logs_dir: null
              enable_access_log: true
            """,
        ),
        {"/text": ("it was the best", "it wa in french")},
        ignored=("grpc_options",),
    ),
    "pizza": Kind(
        "a graph with user configurations and a variable of the environment",
        _file(
            """
            - import_path: ray_programs.pizza_app
              deployments:
              - name: Router
                graceful_shutdown_timeout_s: 0.0001
              - name: Multiplier
                user_config: {factor: 1}
              - name: Adder
                ray_actor_options:
                  runtime_env:
                    env_vars: {OVERRIDE_INCREMENT: '1'}
            """
        ),
        {"/": (["ADD", 2], "3 pizzas please!")},
    ),
    "two_pizzas": Kind(
        "several applications of the same code",
        _file(
            """
            - name: app1
              route_prefix: /app1
              import_path: ray_programs.pizza_app
              deployments:
              - {name: Multiplier, user_config: {factor: 1}}
            - name: app2
              route_prefix: /app2
              import_path: ray_programs.pizza_app
              deployments:
              - {name: Multiplier, user_config: {factor: 2}}
              - {name: Adder, user_config: {increment: 3}}
            """
        ),
        {"/app1": (["MUL", 2], "2 pizzas please!"), "/app2": (["ADD", 2], "5 pizzas please!")},
    ),
    "apps_with_args": Kind(
        "applications that functions build from `args`, typed and untyped",
        _file(
            """
            - {name: plain, route_prefix: /plain, import_path: "ray_programs:build_echo"}
            - name: typed
              route_prefix: /typed
              import_path: ray_programs:build_typed_echo
              args: {message: hello}
            """
        ),
        {"/plain": (None, "DEFAULT"), "/typed": (None, "hello")},
    ),
    "chat": Kind(
        "FastAPI with streams, WebSockets and batches",
        _file("- {name: chat, route_prefix: /chat, import_path: 'ray_programs:chat_app'}"),
        {"/chat/stream": (None, "one two"), "/chat/double/4": (None, "8")},
    ),
    "timeout": Kind(
        "HTTP options with a timeout of requests",
        _file(
            "- {name: app1, route_prefix: /app1, import_path: ray_programs.sleeping_app}",
            """
            http_options:
              request_timeout_s: 30
              keep_alive_timeout_s: 5
            """,
        ),
        {"/app1": (None, "slept")},
    ),
    "autoscaling": Kind(
        "autoscaling, with all options as `serve build` writes them",
        _file(
            """
            - name: app1
              import_path: ray_programs:model_app
              deployments:
              - name: Model
                num_replicas: auto
                max_ongoing_requests: 4
                autoscaling_config:
                  min_replicas: 1
                  initial_replicas: null
                  max_replicas: 32
                  target_ongoing_requests: 2.0
                  metrics_interval_s: 10.0
                  look_back_period_s: 30.0
                  smoothing_factor: 1.0
                  upscaling_factor: null
                  downscaling_factor: null
                  downscale_delay_s: 600.0
                  downscale_to_zero_delay_s: null
                  upscale_delay_s: 30.0
                  aggregation_function: mean
            """
        ),
        {"/": (None, "scored")},
    ),
    "custom_autoscaling": Kind(
        "a policy of autoscaling of your own",
        _file(
            """
            - name: app1
              import_path: ray_programs:model_app
              deployments:
              - name: Model
                num_replicas: auto
                ray_actor_options: {num_cpus: 0.0}
                autoscaling_config:
                  min_replicas: 1
                  max_replicas: 2
                  upscale_delay_s: 1
                  downscale_delay_s: 2
                  policy:
                    policy_function: ray_programs.two_replicas
            """
        ),
        {"/": (None, "scored")},
    ),
    "application_autoscaling": Kind(
        "one policy of autoscaling for an application",
        _file(
            """
            - name: MyApp
              import_path: ray_programs:pipeline_app
              autoscaling_policy:
                policy_function: ray_programs:coordinated
              deployments:
              - name: Preprocessor
                autoscaling_config: {min_replicas: 1, max_replicas: 10, target_ongoing_requests: 1}
              - name: Model
                autoscaling_config: {min_replicas: 2, max_replicas: 20, upscale_delay_s: 3}
            """
        ),
        {"/": (None, "prepared scored")},
    ),
    "external_scaler": Kind(
        "an application that other programs scale",
        _file(
            """
            - name: my-app
              import_path: ray_programs:model_app
              external_scaler_enabled: true
              deployments:
              - {name: Model, num_replicas: 1}
            """
        ),
        {"/": (None, "scored")},
    ),
    "gangs": Kind(
        "gangs of replicas",
        _file(
            """
            - name: app1
              import_path: ray_programs:gang_app
              deployments:
              - name: GangApp
                num_replicas: 4
                ray_actor_options: {num_cpus: 0.25}
                gang_scheduling_config:
                  gang_size: 2
                  gang_placement_strategy: PACK
            """
        ),
        {"/": (None, "2")},
    ),
    "deployment_actors": Kind(
        "actors of a deployment",
        _file(
            """
            - import_path: ray_programs:counted_app
              deployments:
              - name: Counted
                deployment_actors:
                - name: counter
                  actor_class: ray_programs:SharedCounter
                  init_kwargs: {start: 88}
            """
        ),
        {"/": (None, "89")},
    ),
    "placement_groups": Kind(
        "placement groups",
        _file(
            """
            - name: valid
              route_prefix: /valid
              import_path: ray_programs.model_app
              deployments:
              - name: Model
                ray_actor_options: {num_cpus: 0.5}
                placement_group_bundles: [{CPU: 1}]
                placement_group_strategy: STRICT_PACK
            """
        ),
        {"/valid": (None, "scored")},
    ),
    "max_replicas_per_node": Kind(
        "replicas spread over nodes",
        _file(
            """
            - import_path: ray_programs.model_app
              deployments:
              - {name: Model, num_replicas: 2, max_replicas_per_node: 2}
            """
        ),
        {"/": (None, "scored")},
    ),
    "environment": Kind(
        "a `runtime_env` with variables",
        _file(
            """
            - import_path: ray_programs.variables_app
              runtime_env:
                env_vars: {OMP_NUM_THREADS: '3'}
                excludes: [.git]
            """
        ),
        {"/": (None, "3")},
        ignored=("excludes",),
    ),
    "capacity": Kind(
        "`target_capacity`, as KubeRay writes it during an upgrade",
        _file(
            """
            - import_path: ray_programs.model_app
              deployments:
              - {name: Model, num_replicas: 2}
            """,
            "target_capacity: 50\n",
        ),
        {"/": (None, "scored")},
    ),
    "broken": Kind(
        "a constructor that fails, beside an application that runs",
        _file(
            """
            - {name: broken, route_prefix: /broken, import_path: ray_programs.broken_app}
            - {name: good, route_prefix: /good, import_path: ray_programs.hello_app}
            """
        ),
        {"/good": (None, "hello")},
        fails={"broken": "the weights are not there"},
    ),
    "import_error": Kind(
        "a module that is missing",
        _file("- {name: lost, import_path: ray_programs_of_nobody.app}"),
        fails={"lost": "there is no module 'ray_programs_of_nobody'"},
    ),
    "service": Kind(
        "a service of Anyscale",
        _file(
            """
            - import_path: ray_programs:hello_app
            """,
            """
            name: my-service
            image_uri:
            compute_config:
              auto_select_worker_config: true
            working_dir: .
            """,
        ),
        lacks=("working_dir",),
        ignored=("name", "compute_config"),
    ),
    "single": Kind(
        "the old form of one application, without `applications`",
        dedent(
            """
            import_path: ray_programs.model_app
            host: 127.0.0.1
            port: 8000
            deployments:
            - {name: Model, num_replicas: 1}
            """
        ),
        lacks=("host", "port"),
    ),
    "local_environment": Kind(
        "a `runtime_env` of files beside the file, and `py_modules`",
        _file(
            """
            - import_path: ray_programs:hello_app
              runtime_env:
                working_dir: .
                pip: requirements.txt
                py_modules: [https://example.com/module.zip]
            """
        ),
        lacks=("working_dir", "pip", "py_modules"),
    ),
    "grpc": Kind(
        "gRPC",
        _file(
            "- {name: app1, import_path: 'ray_programs:hello_app'}",
            """
            grpc_options:
              port: 9000
              grpc_servicer_functions: [user_pb2_grpc.add_to_server]
            """,
        ),
        lacks=("grpc_options",),
    ),
    "router": Kind(
        "a request router of your own",
        _file(
            """
            - import_path: ray_programs:hello_app
              deployments:
              - name: hello
                request_router_config:
                  request_router_class: ray_programs:FirstRouter
            """
        ),
    ),
    "llm": Kind(
        "an application of Ray itself, such as `ray.serve.llm`",
        _file("- {import_path: 'ray.serve.llm:build_openai_app', args: {llm_configs: []}}"),
        lacks=("ray.serve.llm",),
    ),
    "queue": Kind(
        "autoscaling by a policy of Ray itself, such as that of task consumers",
        _file(
            """
            - import_path: ray_programs:model_app
              deployments:
              - name: Model
                autoscaling_config:
                  policy:
                    policy_function: "ray.serve.async_inference_autoscaling_policy:QueuePolicy"
                    policy_kwargs: {broker_url: "redis://localhost:6379/0", queue_name: my_queue}
            """
        ),
        lacks=("Ray Serve's own code",),
    ),
    "kuberay": Kind(
        "a `RayService` of Kubernetes",
        dedent(
            """
            apiVersion: ray.io/v1
            kind: RayService
            metadata: {name: sample}
            spec:
              serveConfigV2: |
                applications:
                - import_path: ray_programs:hello_app
            """
        ),
        lacks=("RayService",),
    ),
}
