"""Encrypted clusters, and HTTPS proxies."""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from clusters import nannied_cluster, worker_of
from cut_off import MIB, cut_off_caller
from dask_processes import dask_scheduler, dask_worker, fetch
from distributed import Client, Security

import daskserve as serve
from daskserve.errors import BadRequestError, ClusterUnreachableError


class Doubler:
    def __call__(self, array: Any) -> Any:
        return array * 2


def hello(request: Any) -> str:
    return "hello"


@pytest.fixture(scope="module")
def security() -> Security:
    return Security.temporary()


@pytest.fixture(scope="module")
def encrypted(security: Security) -> Iterator[Client]:
    """Yield a client of a cluster of two workers that requires TLS with certificates of one authority."""
    with nannied_cluster(2, protocol="tls", security=security) as client:
        yield client


@pytest.fixture(scope="module")
def client(encrypted: Client) -> Iterator[serve.Client]:
    with serve.start(dask_client=encrypted, http_options={"port": 0}) as client:
        (apart,) = set(encrypted.scheduler_info(n_workers=-1)["workers"]) - {worker_of(client, "proxy")}
        options = {"workers": [apart]}
        client.deploy("doubler", Doubler, actor_options=options)
        client.create_backend("hello", hello, actor_options=options)
        client.create_endpoint("hello", backend="hello", route="/hello")
        yield client


def connections(dask_worker: Any) -> set[str]:
    """Return the classes of the comms of accepted channels."""
    comms = dask_worker._comms.items()
    return {type(comm).__name__ for comm, op in comms if op == "daskserve_channel"}


@pytest.mark.smoke
def test_the_connection_to_a_replica_is_encrypted(client: serve.Client, encrypted: Client) -> None:
    assert fetch(client.http_urls()[0] + "/hello").text == "hello"
    assert set().union(*encrypted.run(connections).values()) == {"TLS"}


def test_handles_reach_replicas_from_outside(client: serve.Client) -> None:
    array = np.arange(MIB)
    assert (client.get_handle("doubler").remote(array).result(20) == array * 2).all()


@pytest.mark.nightly
def test_a_splice_is_encrypted_on_both_sides(
    encrypted: Client, client: serve.Client, security: Security, tmp_path: Path
) -> None:
    with cut_off_caller(encrypted.scheduler.address, tmp_path, security=security) as caller:
        caller.ask("deploy", "m", None, 2)
        assert caller.ask("arrays", "m", 16, 2) == 2
        assert caller.ask("refused") != []
        found = encrypted.run_on_scheduler(splices)
        assert found
        assert set(found) == {"TLS"}
        assert set().union(*encrypted.run(connections).values()) == {"TLS"}


def splices(dask_scheduler: Any) -> list[str]:
    return [type(comm).__name__ for comm, op in dask_scheduler._comms.items() if op == "daskserve_splice"]


def test_a_program_without_certificates_is_refused(encrypted: Client) -> None:
    address = encrypted.scheduler.address
    with pytest.raises(ClusterUnreachableError, match=r"With TLS, set Dask's distributed\.comm\.tls"):
        serve.connect(address=address)
    with dask.config.set({"daskserve.timeouts.connect-s": 1}):
        with pytest.raises(ClusterUnreachableError):
            serve.connect(address=address.replace("tls", "tcp"))


def test_a_program_with_certificates_of_another_authority_is_refused(encrypted: Client) -> None:
    with dask.config.set({**tls_configuration(Security.temporary()), "daskserve.timeouts.connect-s": 1}):
        with pytest.raises(ClusterUnreachableError):
            serve.connect(address=encrypted.scheduler.address)


def tls_configuration(security: Security) -> dict[str, Any]:
    return {
        "distributed.comm.tls.ca-file": security.tls_ca_file,
        "distributed.comm.tls.client.cert": security.tls_client_cert,
        "distributed.comm.tls.client.key": security.tls_client_key,
    }


def test_the_dask_configuration_is_enough_to_connect(encrypted: Client, security: Security) -> None:
    with dask.config.set(tls_configuration(security)):
        with serve.start(address=encrypted.scheduler.address, http_options={"location": "NoServer"}) as other:
            other.deploy("d", Doubler)
            assert other.get_handle("d").remote(21).result(20) == 42
            other._connection.cluster_connection.client.close()


@pytest.mark.nightly
def test_a_local_cluster_is_encrypted_if_the_dask_configuration_says_so(security: Security) -> None:
    configuration: dict[str, Any] = tls_configuration(security)
    configuration["distributed.comm.default-scheme"] = "tls"
    for role in ("scheduler", "worker"):
        configuration[f"distributed.comm.tls.{role}.cert"] = getattr(security, f"tls_{role}_cert")
        configuration[f"distributed.comm.tls.{role}.key"] = getattr(security, f"tls_{role}_key")
    configuration["distributed.comm.require-encryption"] = True
    configuration["pool"] = object()  # Dask allows objects here, which cannot be sent to another process
    with dask.config.set(configuration), serve.start(http_options={"location": "NoServer"}) as client:
        assert client.scheduler_address.startswith("tls://")
        client.deploy("d", Doubler)
        assert client.get_handle("d").remote(21).result(20) == 42


class CallsHello:
    """Calls another backend."""

    async def __call__(self, request: Any) -> Any:
        return "and " + await serve.connect().get_handle("hello").remote()


@pytest.mark.nightly
def test_processes_with_only_the_certificate_of_their_role_can_connect(
    security: Security, tmp_path: Path
) -> None:
    """These are the options of ``dask scheduler`` and ``dask worker``; both processes also act as clients."""
    flags, files = [], {}
    for option, name in (
        ("--tls-ca-file", "ca_file"),
        ("--tls-cert", "client_cert"),
        ("--tls-key", "client_key"),
    ):
        file = tmp_path / f"{name}.pem"
        file.write_text(getattr(security, f"tls_{name}"))
        flags += [option, str(file)]
        files[f"tls_{name}"] = str(file)
    with (
        dask_scheduler(tmp_path, extra=["--protocol", "tls", *flags]) as address,
        dask_worker(address, tmp_path, extra=flags),
        dask_worker(address, tmp_path, extra=flags),
        Client(
            address, security=Security(**files, require_encryption=True), set_as_default=False
        ) as dask_client,
    ):
        dask_client.wait_for_workers(2)
        with serve.start(dask_client=dask_client, http_options={"port": 0}, detached=True) as client:
            (apart,) = set(dask_client.scheduler_info(n_workers=-1)["workers"]) - {worker_of(client, "proxy")}
            options = {"workers": [apart]}
            client.create_backend("hello", hello, actor_options=options)
            client.create_endpoint("hello", backend="hello", route="/hello")
            isolated = {"isolation": "process"}
            client.create_backend("caller", CallsHello, actor_options=options, config=isolated)
            client.create_endpoint("caller", backend="caller", route="/caller")
            for path, text in (("hello", "hello"), ("caller", "and hello")):
                assert fetch(f"{client.http_urls()[0]}/{path}").text == text
            assert client.get_handle("caller").remote().result(20) == "and hello"
            assert set().union(*dask_client.run(connections).values()) == {"TLS"}
            client.shutdown()


def test_the_proxy_serves_https(encrypted: Client, security: Security, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text(security.tls_scheduler_cert)
    (tmp_path / "key.pem").write_text(security.tls_scheduler_key)
    files = {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
    with serve.start(dask_client=encrypted, http_options={"port": 0, **files}) as client:
        client.create_backend("hello", hello)
        client.create_endpoint("hello", backend="hello", route="/hello")
        (url,) = client.http_urls()
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=files["ssl_certfile"])
        trusting.check_hostname = False
        with urllib.request.urlopen(f"{url}/hello", context=trusting, timeout=20) as answer:
            assert answer.read() == b"hello"
        assert client.view("get_http_config")["ssl_keyfile_password"] is None


def test_a_missing_certificate_fails_the_start(encrypted: Client) -> None:
    with pytest.raises(BadRequestError, match=r"ssl_certfile='/nowhere\.pem' cannot be read on"):
        serve.start(dask_client=encrypted, http_options={"port": 0, "ssl_certfile": "/nowhere.pem"})
