from __future__ import annotations

import pytest

from daskserve import errors
from daskserve.proxies.ingress.errors import ErrorReply, reply_to

RETRY_1 = ((b"retry-after", b"1"),)


class UserMistakeError(ValueError):
    """What user code raises is not ours, whatever its base."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            errors.BackPressureError("full", retry_after_s=2.1),
            ErrorReply(503, "full", ((b"retry-after", b"3"),)),
        ),
        (errors.BackPressureError("full", retry_after_s=0), ErrorReply(503, "full", RETRY_1)),
        (errors.UnavailableError("none"), ErrorReply(503, "none", RETRY_1)),
        (errors.ReplicaBusyError("busy"), ErrorReply(503, "busy", RETRY_1)),
        (errors.ActorLostError("lost"), ErrorReply(502, "lost")),
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
    assert reply_to(error) == expected


def test_only_debug_shows_the_traceback_of_a_fault() -> None:
    try:
        raise UserMistakeError("secret")
    except UserMistakeError as error:
        reply = reply_to(error, debug=True)
    assert reply.status == 500
    assert reply.text.startswith("Traceback (most recent call last):")
    assert reply.text.rstrip().endswith("UserMistakeError: secret")


def test_debug_does_not_change_errors_with_an_explanation() -> None:
    error = errors.UnavailableError("none")
    assert reply_to(error, debug=True) == reply_to(error)


@pytest.mark.parametrize("kind", errors.subclasses())
def test_every_daskserve_error_has_a_reply_with_its_status_or_a_bare_500(
    kind: type[errors.ServeError],
) -> None:
    reply = reply_to(kind("text"))
    assert reply.status == kind.http_status
    assert reply.is_fault == (reply.status == 500)
    assert (reply.text == "text") == (reply.status != 500)
