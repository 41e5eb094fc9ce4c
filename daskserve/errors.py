"""The errors that daskserve raises, named by what the caller can do about them.

::

    ServeError                          500
    ├── BadRequestError        (ValueError)  400   fix the arguments
    │   ├── AlreadyRegisteredError
    │   ├── ConfigFileError                    correct the lines of the file that it names
    │   ├── NotRegisteredError
    │   ├── StreamOptionError  (TypeError)         add or remove stream=True
    │   ├── UnpicklableError   (TypeError)         create the object where the replica runs
    │   └── WrongTypeError     (TypeError)         give the option a value of its type
    ├── BodyTooLargeError                    413   send less, or raise max_body_bytes
    ├── NotFoundError          (KeyError)    404   use a name that exists, see serve.status()
    ├── MethodNotFoundError (AttributeError) 404   call a method that the deployment has
    ├── ExternalScalerDisabledError          412   set external_scaler_enabled on the backend first
    ├── VersionConflictError                 412   read it again, and make the change to that
    ├── InspectionError                      409   try again later, or another replica
    ├── ClosedError                          500   start or connect to an instance first
    ├── BlockingCallError      (RuntimeError) 500  await the call's asynchronous form
    ├── NotInReplicaError      (RuntimeError) 500  make the call in code that a replica runs
    ├── InstanceError                        500   start one, or connect to another
    │   ├── AlreadyRunningError                    connect to it, or shut it down first
    │   ├── NotRunningError                        start it, or connect to another
    │   ├── ClusterUnreachableError (OSError)      start the scheduler, or give its right address
    │   ├── VersionMismatchError                   install the same version everywhere
    │   ├── LibraryVersionError                    install a version of the library that works
    │   ├── StoreLostError                         put the store back, or call rewrite_store()
    │   ├── StoreTakenError                  409   make the change at the instance that owns the store
    │   └── PortInUseError     (OSError, ValueError)  choose another port, or end the other program
    ├── DeployError            (RuntimeError) 500 read its text, fix the cause, change again
    │   ├── ReplicaStartError                      fix the code; user_traceback says where
    │   │   └── CodeLoadError                      deploy it again: the code is lost, or cannot be loaded
    │   ├── NoCapacityError                        add workers, or ask for fewer resources
    │   ├── SupersededError                  409   see by whom; deploy again if yours is to stay
    │   └── DeletedError                     410   deploy it again
    ├── BackPressureError                    503   retry later
    ├── UnavailableError                     503   call again later
    │   ├── DeploymentUnavailableError             deploy it again: its last deploy failed
    │   │   └── CodeUnavailableError               deploy it again: its code is lost, or cannot be loaded
    │   ├── DeploymentIsBeingDeletedError          deploy it again, or call another one
    │   ├── ReplicaUnavailableError                choose another replica
    │   ├── QuarantinedError                       find out what ends the processes of this request
    │   ├── StaleEpochError                        call again: a newer controller has taken over
    │   ├── ReplicaBusyError                       call again: it was not begun
    │   └── ActorLostError                         call again, or not: if `begun`, code may have run
    ├── RequestTimeoutError    (TimeoutError) 408  allow more time, or find out what takes it
    ├── RequestCancelledError  (CancelledError) 499 call again, unless you cancelled it
    ├── PassedResponseError    (RuntimeError) 500  await the response or body, or pass it to another handle
    ├── BatchResultError       (TypeError)   500  return a list, with one result for each request
    ├── StepError                            500  fix the code; the request itself may be the reason
    └── UserCodeError                        500   define the class in a module of both processes

Every class takes one message, plus keyword fields with defaults that live in ``__dict__``. This lets
`BaseException.__reduce__` carry them between processes unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any, ClassVar


class ServeError(Exception):
    """Root of all errors that daskserve raises.

    Attributes
    ----------
    http_status : int
        The status of the response to a request that fails with it.
    is_retryable : bool
        Whether the same request or call may succeed later. A request that is not idempotent may have run.
    user_traceback : str
        The traceback of the user's code that is the reason, from inside a replica or a worker; empty if there
        is none.
    """

    http_status: ClassVar[int] = 500
    is_retryable: ClassVar[bool] = False
    user_traceback: str = ""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)

    def __str__(self) -> str:
        # KeyError's own __str__ returns the repr of the message.
        return str(self.args[0]) if self.args else ""


class BadRequestError(ServeError, ValueError):
    """The arguments are wrong; the same call will fail again."""

    http_status = 400


class WrongTypeError(BadRequestError, TypeError):
    """An option has a value of a wrong type."""


class AlreadyRegisteredError(BadRequestError):
    """A backend, endpoint or route of this name exists with a different definition."""


class NotRegisteredError(BadRequestError):
    """A change names a backend or endpoint that does not exist."""


class ConfigFileError(BadRequestError):
    """A configuration file has errors; the message has a line for each, with its place in the file."""


class StreamOptionError(BadRequestError, TypeError):
    """A stream was requested from a method that is not a generator, or a single answer from a generator."""


class UnpicklableError(BadRequestError, TypeError):
    """Code or arguments of a deployment cannot be pickled for its replicas."""


class BodyTooLargeError(ServeError):
    """The body of an HTTP request exceeds ``max_body_bytes``."""

    http_status = 413


class NotFoundError(ServeError, KeyError):
    """A lookup names something that does not exist.

    Attributes
    ----------
    reason : str
        Why it does not exist, if its deploy failed.
    """

    http_status = 404

    def __init__(self, message: str = "", *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class MethodNotFoundError(ServeError, AttributeError):
    """A call names a method that the deployment does not have."""

    http_status = 404


class ExternalScalerDisabledError(ServeError):
    """The backend does not accept external scaling; see ``external_scaler_enabled``."""

    http_status = 412


class VersionConflictError(ServeError):
    """The version that the caller has read is no longer current."""

    http_status = 412


class InspectionError(ServeError):
    """The code of a replica cannot be inspected now, because it does not run or does not answer."""

    http_status = 409


class ClosedError(ServeError):
    """The client or instance has been shut down."""


class BlockingCallError(ServeError, RuntimeError):
    """A call blocks the event loop that has to run it."""


class NotInReplicaError(ServeError, RuntimeError):
    """Code outside of a replica used a function for replicas."""


class InstanceError(ServeError):
    """An instance could not be started, found or reached."""


class AlreadyRunningError(InstanceError):
    """A detached instance is already running on this cluster."""


class NotRunningError(InstanceError):
    """No instance of this name runs on the cluster."""


class ClusterUnreachableError(InstanceError, OSError):
    """No Dask scheduler answers at the address."""


class VersionMismatchError(InstanceError):
    """The scheduler or a worker has no daskserve, or a different version."""


class LibraryVersionError(InstanceError):
    """An installed library is too old or too new for daskserve; the message says which version to install.

    Attributes
    ----------
    library : str
        Its name, as pip takes it, or ``"python"``.
    installed : str
        The version that is installed.
    versions : str
        The versions that work, as pip takes them: ``">=6.6,<6.7"``.
    """

    def __init__(
        self, message: str = "", *, library: str = "", installed: str = "", versions: str = ""
    ) -> None:
        super().__init__(message)
        self.library = library
        self.installed = installed
        self.versions = versions


class StoreLostError(InstanceError):
    """The store's file or folder was removed, moved or replaced while in use.

    The change was refused. `Client.rewrite_store` rewrites all records to the place that the URL names.
    """


class StoreTakenError(InstanceError):
    """Another cluster has taken over the store. This instance continues to serve, but accepts no changes."""

    http_status = 409


class PortInUseError(InstanceError, OSError, ValueError):
    """Another program or instance already listens on the requested port."""


class DeployError(ServeError, RuntimeError):
    """A change was accepted but could not be completed."""


class ReplicaStartError(DeployError):
    """User code failed while a replica started; ``user_traceback`` says where."""

    def __init__(self, message: str = "", *, user_traceback: str = "") -> None:
        super().__init__(message)
        self.user_traceback = user_traceback


class CodeLoadError(ReplicaStartError):
    """The code of a replica is lost or damaged, or cannot be loaded where it should run."""


class RolloutError(DeployError):
    """A new version was rolled back before its rollout was complete: a gate failed, or ``by`` aborted it."""

    def __init__(self, message: str = "", *, by: str = "") -> None:
        super().__init__(message)
        self.by = by


class NoCapacityError(DeployError):
    """No worker has room for a replica."""


class SupersededError(DeployError):
    """A later change replaced this one before it was complete. Its version may never have served.

    Attributes
    ----------
    by : str
        The program that made the later change.
    version : str
        The version that the later change deploys; of an application, its ingress's.
    goal : str
        The goal of the later change, for `Client.wait_for_goal`.
    """

    http_status = 409

    def __init__(self, message: str = "", *, by: str = "", version: str = "", goal: str = "") -> None:
        super().__init__(message)
        self.by = by
        self.version = version
        self.goal = goal


class DeletedError(DeployError):
    """A deployment was deleted before its change was complete.

    Attributes
    ----------
    by : str
        The program that deleted it.
    """

    http_status = 410

    def __init__(self, message: str = "", *, by: str = "") -> None:
        super().__init__(message)
        self.by = by


class BackPressureError(ServeError):
    """The router's queue for a backend is full; retry after ``retry_after_s``."""

    http_status = 503
    is_retryable = True

    def __init__(
        self,
        message: str = "",
        *,
        num_queued_requests: int = 0,
        max_queued_requests: int = 0,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message)
        self.num_queued_requests = num_queued_requests
        self.max_queued_requests = max_queued_requests
        self.retry_after_s = retry_after_s


class UnavailableError(ServeError):
    """No replica can take the request at the moment.

    Attributes
    ----------
    is_public : bool
        Whether HTTP clients may read the message: it names no addresses, processes or replicas. Otherwise
        they get ``public_reason``, and the log of the proxy has the message.
    public_reason : str
        A description of the problem, for unknown clients.
    """

    http_status = 503
    is_retryable = True
    public_reason: ClassVar[str] = "no replica can take it at the moment"
    is_public = False

    def __init__(self, message: str = "", *, is_public: bool = False) -> None:
        super().__init__(message)
        if is_public:
            self.is_public = is_public


class ReplicaBusyError(UnavailableError):
    """The replica runs its maximum number of requests; this request was not begun."""

    def __init__(self, message: str = "", *, ongoing: int = 0) -> None:
        super().__init__(message)
        self.ongoing = ongoing


class ActorLostError(UnavailableError):
    """The actor, its worker, or the connection to it was lost.

    Attributes
    ----------
    begun : bool
        False only if user code cannot have seen the request.
    is_disconnected : bool
        Only the connection is known to be broken: the actor may be alive, and a new connection may reach it.
    is_planned : bool
        The actor was healthy when it was stopped, so this request is not the reason.
    """

    http_status = 502
    public_reason = "the replica that had it was lost"

    def __init__(
        self,
        message: str = "",
        *,
        begun: bool = True,
        is_disconnected: bool = False,
        is_planned: bool = False,
    ) -> None:
        super().__init__(message)
        self.begun = begun
        self.is_disconnected = is_disconnected
        self.is_planned = is_planned


class DeploymentUnavailableError(UnavailableError):
    """The last deploy of this deployment failed, and it has no replica."""

    is_retryable = False
    public_reason = "its deployment failed to deploy"


class CodeUnavailableError(DeploymentUnavailableError):
    """The deployment has no replica, and cannot start one: its code is lost, or cannot be loaded."""

    public_reason = "its code is lost or cannot be loaded; it has to be deployed again"


class DeploymentIsBeingDeletedError(UnavailableError):
    """The deployment is being deleted, or was deleted while the request waited."""

    is_retryable = False


class ReplicaUnavailableError(UnavailableError):
    """The chosen replica has stopped, or was lost."""


class ModelCapacityError(UnavailableError):
    """A multiplexed model has no room in its replica: it is too large, or all other models are in use."""


class QuarantinedError(UnavailableError):
    """Retries of the same request ended or blocked several processes, so it is refused for a moment."""

    http_status = 502
    is_retryable = False


class StaleEpochError(UnavailableError):
    """A newer controller has taken over; retry the call there."""


class RequestTimeoutError(ServeError, TimeoutError):
    """The request, or the change, was not answered in time."""

    http_status = 408
    is_retryable = True


#: The beginning of an error text that names both deployments of a call.
CALL_FROM = "A call from "
#: The errors of a deployment that come from its load or its state, not from a mistake. A deployment whose
#: code raises one gives its own callers the same answer.
REFUSALS = (BackPressureError, UnavailableError, RequestTimeoutError)


class RequestCancelledError(ServeError, CancelledError):
    """The call was cancelled: by ``cancel``, or because the request that made the call was cancelled.

    It is a ``concurrent.futures.CancelledError``, not the ``asyncio.CancelledError`` of a cancelled task.
    """

    http_status = 499


class PassedResponseError(ServeError, RuntimeError):
    """A response, or a request whose body was not read yet, cannot be pickled.

    Only handles accept them as arguments; no handle accepts a stream.
    """


class BatchResultError(ServeError, TypeError):
    """User code answered a batch with something other than a list of results."""


class StepError(ServeError):
    """User code raises it to end only these ``requests`` of a continuous batch; their callers get it."""

    def __init__(self, message: str = "", *, requests: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.requests = requests

    def for_callers(self) -> StepError:
        """Return the error for callers: without the requests, and with the same cause."""
        if not self.requests:
            return self
        error = StepError(str(self))
        error.__cause__ = self.__cause__
        error.__traceback__ = self.__traceback__
        return error


class UserCodeError(ServeError):
    """User code raised an error whose class the caller cannot import; the message has its name and text."""


class RemoteTraceback(Exception):
    """The traceback of the process where an error was raised, shown as that error's cause."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n{str(self.args[0]).rstrip()}" if self.args else ""


def http_status_of(error: BaseException) -> int:
    """Return the HTTP status of an error; errors of other libraries give 500."""
    return error.http_status if isinstance(error, ServeError) else 500


def subclasses(root: type[ServeError] = ServeError) -> list[type[Any]]:
    """Return ``root`` and all of its subclasses."""
    found: list[type[Any]] = [root]
    for child in root.__subclasses__():
        found.extend(subclasses(child))
    return found
