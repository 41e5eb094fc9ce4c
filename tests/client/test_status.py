"""The printed status."""

from __future__ import annotations

from daskserve.client.views.links import links_of
from daskserve.client.views.status import (
    ActorStatus,
    ApplicationStatus,
    BackendStatus,
    DeadReplicaStatus,
    DeploymentStatus,
    EndpointStatus,
    Status,
)
from daskserve.client.views.table import table

METHODS = ("GET",)


def test_columns_are_aligned_and_empty_ones_are_left_out() -> None:
    rows = [("a", "", "1"), ("long name", "", "")]
    assert table(("NAME", "EMPTY", "SIZE"), rows) == "NAME       SIZE\na          1\nlong name"
    assert table(("NAME",), []) == ""


def test_no_instance_is_said_in_words() -> None:
    assert str(Status()) == "No instance runs."


def test_the_proxies_are_listed_with_their_state() -> None:
    words = {"one": "RUNNING", "two": "STARTING"}
    actors = [ActorStatus("proxy", name, word) for name, word in words.items()]
    status = Status(actors=(ActorStatus("controller", "c", "RUNNING"), *actors))
    assert status.proxies == {"one": "HEALTHY", "two": "STARTING"}
    assert Status().proxies == {}


def test_a_status_is_a_table_of_backends_and_one_of_actors() -> None:
    status = Status(
        instance="daskserve",
        epoch=1,
        actors=(
            ActorStatus("controller", "daskserve/controller", "RUNNING", "tcp://a:1", "a", 7),
            ActorStatus("replica", "digits#abcdef", "STARTING", "tcp://b:1", "b"),
        ),
        backends={
            "words": BackendStatus("HEALTHY", 2, 2, "v1"),
            "digits": BackendStatus(
                "UPDATING",
                1,
                0,
                "v2",
                "a replica failed to start\nTraceback",
                (
                    DeadReplicaStatus("digits#0", "no answer", 0.0, "", ("zero",)),
                    DeadReplicaStatus("digits#1", "it is broken\nand more", 0.0, "", ("one", "two")),
                ),
            ),
        },
        endpoints={
            "digits": EndpointStatus("/digits", METHODS, {"digits": 1.0}, {}),
            "text": EndpointStatus("/text", METHODS, {"words": 1.0, "digits": 0.0}, {}),
            "hidden": EndpointStatus(None, METHODS, {"words": 1.0}, {}),
        },
        applications={
            "default": ApplicationStatus(
                "DEPLOY_FAILED",
                "Deployment 'digits' failed: no room\nTraceback",
                route_prefix="/digits",
                deployments={
                    "words": DeploymentStatus("HEALTHY"),
                    "digits": DeploymentStatus("DEPLOY_FAILED"),
                },
            )
        },
        http_urls=("http://127.0.0.1:8000",),
        target_capacity=50.0,
        target_capacity_direction="DOWN",
        unresponsive_workers=("tcp://c:1",),
        broken_routes={"tcp://a:1": {"tcp://b:1": "scheduler", "tcp://e:1": "none"}},
        refused_workers={"tcp://d:1": "it has no daskserve."},
        problems={"backend/x": "unreadable"},
    )
    assert str(status).splitlines() == [
        "daskserve at http://127.0.0.1:8000: 1 of 2 deployments are healthy.",
        "The target capacity is 50 %, DOWN.",
        "",
        "APPLICATION  STATUS         ROUTE    DEPLOYMENTS    MESSAGE",
        "default      DEPLOY_FAILED  /digits  words, digits  Deployment 'digits' failed: no room",
        "",
        "DEPLOYMENT  STATUS    RUNNING  ROUTE    VERSION  MESSAGE",
        "digits      UPDATING  0 of 1   /digits  v2       a replica failed to start",
        "words       HEALTHY   2 of 2   /text    v1",
        "",
        "ACTOR       NAME                  STATE     WORKER     PID",
        "controller  daskserve/controller  RUNNING   tcp://a:1  7",
        "replica     digits#abcdef         STARTING  tcp://b:1",
        "",
        "LOST REPLICA  AT                       REASON",
        "digits#0      1970-01-01 00:00:00 UTC  no answer",
        "digits#1      1970-01-01 00:00:00 UTC  it is broken",
        "",
        "Application 'default':",
        "Traceback",
        "",
        "The last log lines of digits#1:",
        "one",
        "two",
        "",
        "Worker tcp://c:1 does not answer.",
        "Worker tcp://a:1 reaches tcp://b:1 only through the scheduler.",
        "Worker tcp://a:1 cannot reach tcp://e:1.",
        "Worker tcp://d:1 gets no actors: it has no daskserve.",
        "Record backend/x could not be read: unreadable",
    ]


def test_a_traceback_names_its_actor_and_deployment_as_the_user_did() -> None:
    message = "a replica failed to start\nTraceback of it"
    status = Status(
        instance="a", backends={"fa/fa:ba::f0911e86": BackendStatus("FAILED", 1, 0, "v", message)}
    )
    assert "Actor 'ba' of deployment 'fa' of application 'fa':\nTraceback of it" in str(status)


def test_in_a_notebook_a_status_is_tables_and_what_users_wrote_is_text() -> None:
    evil = "<img src=x onerror='alert(1)'>&"
    status = Status(
        instance="a",
        actors=(ActorStatus("replica", f"{evil}:log::0123abcd#x", "RUNNING", message=evil),),
        backends={evil: BackendStatus("HEALTHY", 1, 1, evil, f"{evil}\nTraceback")},
        applications={evil: ApplicationStatus("RUNNING", evil, route_prefix="/<b>")},
        problems={evil: f"{evil}\n  line 1"},
    )
    page = status._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 3
    safe = "&lt;img src=x onerror=&#x27;alert(1)&#x27;&gt;&amp;"
    assert "<img" not in page
    assert "<b>" not in page
    assert f'<td style="text-align: left">{safe}:log#x</td>' in page
    assert page.startswith("<p>a at no HTTP proxy: 1 of 1 deployments are healthy.</p>\n<table>")
    assert page.endswith(f"<pre>Record {safe} could not be read: {safe}\n  line 1</pre>")
    assert Status()._repr_html_() == "<p>No instance runs.</p>"


def test_a_notebook_has_links_that_no_configuration_makes_markup() -> None:
    links = links_of('http://127.0.0.1:8787/"><script>/status')
    assert links["panels"] == 'http://127.0.0.1:8787/"><script>/daskserve-panels'
    html = Status(instance="daskserve", links=links)._repr_html_()
    assert "<script>" not in html
    assert html.count("<a href=") == 3
    assert "<a" not in Status(instance="daskserve", links={"page": "javascript:alert(1)"})._repr_html_()
    assert links_of(None) == {}
    assert Status(links=links) == Status()
