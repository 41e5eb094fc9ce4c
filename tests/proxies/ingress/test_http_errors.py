from __future__ import annotations

from tables import each_case

from daskserve import errors
from daskserve.payload.packed_errors import pack_now
from daskserve.proxies.ingress.errors import ErrorReply, reply_to

RETRY_1 = ((b"retry-after", b"1"),)


NO_REPLICA = "no replica can take it at the moment"


def hidden(status: int, reason: str) -> ErrorReply:
    headers = RETRY_1 if status == 503 else ()
    return ErrorReply(status, f"Request 42 failed: {reason}.", headers, hides_message=True)


class UserMistakeError(ValueError):
    """An error of user code does not count as daskserve's, whatever its base class."""


@each_case(
    ("error", "expected"),
    [
        (
            errors.BackPressureError("full", retry_after_s=2.1),
            ErrorReply(503, "full", ((b"retry-after", b"3"),)),
        ),
        (errors.BackPressureError("full", retry_after_s=0), ErrorReply(503, "full", RETRY_1)),
        (errors.BackPressureError("full", retry_after_s=float("inf")), ErrorReply(503, "full")),
        (errors.UnavailableError("none", is_public=True), ErrorReply(503, "none", RETRY_1)),
        (errors.UnavailableError("tcp://10.0.0.1:1 is not open"), hidden(503, NO_REPLICA)),
        (errors.ReplicaBusyError("b#1 is busy"), hidden(503, NO_REPLICA)),
        (errors.ReplicaUnavailableError("b#1 has stopped"), hidden(503, NO_REPLICA)),
        (errors.DeploymentUnavailableError("b: a secret"), hidden(503, "its deployment failed to deploy")),
        (
            errors.CodeUnavailableError("b: a secret"),
            hidden(503, "its code is lost or cannot be loaded; it has to be deployed again"),
        ),
        (errors.ActorLostError("b#1 was lost"), hidden(502, "the replica that had it was lost")),
        (errors.QuarantinedError("too many", is_public=True), ErrorReply(502, "too many")),
        (errors.RequestTimeoutError("late"), ErrorReply(408, "late")),
        (errors.NotFoundError("gone"), ErrorReply(404, "gone")),
        (errors.BadRequestError("no"), ErrorReply(400, "no")),
        (errors.AlreadyRegisteredError("twice"), ErrorReply(400, "twice")),
        (errors.ServeError("secret"), ErrorReply(500, "Internal Server Error", is_fault=True)),
        (errors.DeployError("secret"), ErrorReply(500, "Internal Server Error", is_fault=True)),
        (errors.UserCodeError("secret"), ErrorReply(500, "Internal Server Error", is_fault=True)),
        (UserMistakeError("secret"), ErrorReply(500, "Internal Server Error", is_fault=True)),
        (TimeoutError("secret"), ErrorReply(500, "Internal Server Error", is_fault=True)),
    ],
)
def test_each_error_has_its_reply(error: Exception, expected: ErrorReply) -> None:
    assert reply_to(error, "42") == expected


def test_errors_that_user_code_passes_on_get_the_reply_of_their_cause() -> None:
    for error in (errors.BackPressureError("full", retry_after_s=3), errors.RequestTimeoutError("late")):
        packed = pack_now(error)
        assert packed is not None
        assert reply_to(packed, "42") == reply_to(error, "42")
    packed = pack_now(UserMistakeError("secret"))
    assert packed is not None
    assert reply_to(packed, "42") == reply_to(UserMistakeError("secret"), "42")
    assert "UserMistakeError: secret" in reply_to(packed, "42", debug=True).text


def test_only_debug_shows_the_traceback_of_a_fault() -> None:
    try:
        raise UserMistakeError("secret")
    except UserMistakeError as error:
        reply = reply_to(error, "42", debug=True)
    assert reply.status == 500
    assert reply.text.startswith("Traceback (most recent call last):")
    assert reply.text.rstrip().endswith("UserMistakeError: secret")


@each_case("kind", [errors.UnavailableError, errors.ActorLostError])
def test_debug_shows_the_message_of_an_error_of_the_cluster(kind: type[errors.UnavailableError]) -> None:
    assert reply_to(kind("b#1 at tcp://10.0.0.1:1"), "42", debug=True).text == "b#1 at tcp://10.0.0.1:1"


@each_case("kind", errors.subclasses())
def test_every_daskserve_error_has_a_reply_with_its_status_or_a_bare_500(
    kind: type[errors.ServeError],
) -> None:
    reply = reply_to(kind("text"), "42")
    assert reply.status == kind.http_status
    assert reply.is_fault == (reply.status == 500)
    assert reply.hides_message == issubclass(kind, errors.UnavailableError)
    assert (reply.text == "text") == (reply.status != 500 and not reply.hides_message)
