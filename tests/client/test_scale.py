"""Setting the number of replicas from Python: `serve.scale` and `Client.scale`."""

from __future__ import annotations

from typing import Any

import pytest

import daskserve as serve
from daskserve.errors import BadRequestError, ExternalScalerDisabledError, NotFoundError, NotRunningError
from daskserve.testing import local_instance


def answer(request: Any = None) -> str:
    return "done"


def test_an_external_scaler_sets_the_number_of_an_open_backend() -> None:
    with local_instance() as client:
        client.create_backend("b", answer, config={"external_scaler_enabled": True})
        client.create_backend("closed", answer)
        assert client.scale("b", 3) == 3
        client.update_backend_config("b", {"max_queued_requests": 7})
        for number in (0, -1, 2.5, "3", True):
            with pytest.raises(BadRequestError, match="target_num_replicas is"):
                client.scale("b", number)  # type: ignore[arg-type]
        with pytest.raises(NotFoundError, match="no backend or deployment 'none'"):
            client.scale("none", 2)
        with pytest.raises(ExternalScalerDisabledError, match="'closed' does not allow external scaling"):
            client.scale("closed", 2)
        with pytest.raises(BadRequestError, match="only one of them"):
            client.update_backend_config("b", {"autoscaling_config": {"max_replicas": 3}})
        wanted = {name: each.wanted for name, each in client.status().backends.items()}
        assert wanted == {"b": 3, "closed": 1}


def test_the_functions_of_the_package_use_the_instance_of_run() -> None:
    with local_instance():
        serve.run(serve.deployment(name="d", external_scaler_enabled=True)(answer).bind())
        assert serve.scale("d", 2) == 2
        assert "An external scaler sets the number" in str(serve.explain("d"))
        serve.set_target_capacity(0)
        assert (serve.status().target_capacity, serve.explain("d").wanted) == (0.0, 0)
    with pytest.raises(NotRunningError):
        serve.scale("d", 2)
