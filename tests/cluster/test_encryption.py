"""The certificate that a server presents when it connects as a client."""

from __future__ import annotations

import types

from distributed import Security

from daskserve.cluster.dask.encryption import as_client


def test_a_server_without_a_client_certificate_presents_its_own() -> None:
    for role in ["scheduler", "worker"]:
        files = {f"tls_{role}_cert": "own.pem", f"tls_{role}_key": "own.key", "tls_ca_file": "ca.pem"}
        security = Security(**files, require_encryption=True)
        changed = as_client(security, role)
        assert changed.get_tls_config_for_role("client") == security.get_tls_config_for_role(role), role
        assert changed.require_encryption, role
        assert security.tls_client_cert is None  # it is the server's, and others use it too


def test_other_security_objects_do_not_change() -> None:
    with_one = Security.temporary()
    foreign = types.SimpleNamespace(get_connection_args=None)
    for each in (with_one, foreign):
        assert as_client(each, "worker") is each
    without = Security()
    assert as_client(without, "worker").get_connection_args("client") == without.get_connection_args("client")
