"""Answers requests of the REST API, and streams events and logs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

from distributed import Scheduler
from tornado.iostream import StreamClosedError
from tornado.web import stream_request_body

from daskserve.cluster.scheduler.http.api.access import ControllerAccess
from daskserve.cluster.scheduler.http.api.live import LiveFeeds
from daskserve.cluster.scheduler.http.api.openapi import (
    DOCUMENT_PATH,
    PAGE_PATH,
    RAY_VERSION,
    RAY_VERSION_PATH,
    document,
)
from daskserve.cluster.scheduler.http.api.operations import Operation, by_path, may_take_s
from daskserve.cluster.scheduler.http.api.page import page
from daskserve.cluster.scheduler.http.api.requests import NUMBER, APIRequest, Document
from daskserve.cluster.scheduler.http.route import GuardedHandler, SchedulerRoutes
from daskserve.cluster.scheduler.http.site_guard import BODY, SiteGuard
from daskserve.common import settings
from daskserve.errors import BadRequestError, BodyTooLargeError, ServeError, UnavailableError, http_status_of

#: Value of the ``Retry-After`` header.
RETRY_AFTER_S = 1
#: Maximum number of open streams of events; any further stream is refused with 503.
MAX_STREAMS = 50
#: Time limit for a client to read sent data. After it, the stream ends, and the client may connect again.
FLUSH_S = 60.0
#: Longest silence of a stream. After it, a comment is sent, so that reverse proxies keep the connection open.
SILENCE_S = 15.0
#: Maximum length of the client's name that is recorded.
NAME_LENGTH = 60
#: A comment, which keeps a stream open.
SILENT = ":\n\n"
#: Forbids content of other sites, and scripts.
_POLICY = "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src 'self'; frame-ancestors 'self'"
_ETAG = re.compile(r'(?:W/)?"([0-9]{1,18})"')


class Api:
    """The routes of the REST API.

    Attributes
    ----------
    streams : int
        The number of open streams of events and metrics.
    feeds : LiveFeeds
        The streams of live metrics.
    """

    def __init__(self, scheduler: Scheduler, access: ControllerAccess, guard: SiteGuard) -> None:
        self.access = access
        self.streams = 0
        self.feeds = LiveFeeds(access)
        documents = (f"{PAGE_PATH}/?", re.escape(DOCUMENT_PATH), re.escape(RAY_VERSION_PATH))
        self.routes = SchedulerRoutes(
            scheduler,
            *(
                (
                    next(iter(operations.values())).pattern,
                    ApiHandler,
                    {"api": self, "guard": guard, "operations": operations},
                )
                for operations in by_path().values()
            ),
            *((path, DocumentHandler, {"guard": guard}) for path in documents),
        )


@stream_request_body
class ApiHandler(GuardedHandler):
    """Answers one path."""

    def initialize(self, api: Api, guard: SiteGuard, operations: Mapping[str, Operation]) -> None:
        self._guard = guard
        self._api = api
        self._operations = operations
        self._body = bytearray()
        self._limit = max(each.max_body_bytes for each in operations.values())
        self._is_too_large = False
        self._version: int | None = None

    def data_received(self, chunk: bytes) -> None:
        # Excess bytes are read and dropped: a client that is still sending would not see the answer.
        self._is_too_large = self._is_too_large or len(self._body) + len(chunk) > self._limit
        if not self._is_too_large:
            self._body += chunk

    async def _respond(self, **path: str | None) -> None:
        if self.is_refused():
            return
        operation = self._operations.get(self.request.method or "")
        if operation is None:
            self.write_error(405)
            return
        try:
            instance = path.pop("instance", None)
            request = self._parse(operation, {name: each or "" for name, each in path.items()})
            if not self._is_allowed(operation):
                return
            verb, message = operation.verb(request)
            if operation.is_stream and "text/event-stream" in self.request.headers.get("Accept", ""):
                await self._stream(instance, verb, message)
                return
            value = await self._api.access.call(instance, verb, message, may_take_s(verb, message))
            body = operation.answer(request, value)
        except ServeError as error:
            text = str(error)
            # External scalers of Ray Serve read the error from this field.
            more = {"error": text} if operation.is_guarded else {}
            self.answer(http_status_of(error), {"message": text, **more})
        else:
            if operation.is_conditional and isinstance(value, Mapping):
                self._version = value.get("version")
            self.answer(200, body)

    get = put = post = delete = _respond

    def _parse(self, operation: Operation, path: Mapping[str, str]) -> APIRequest:
        if self._is_too_large or len(self._body) > operation.max_body_bytes:
            self._guard.refusals[BODY] += 1
            raise BodyTooLargeError(f"the body has more than {operation.max_body_bytes} bytes")
        query = {name: self.get_query_argument(name) for name in self.request.query_arguments}
        operation.check(query)
        agent = self.request.headers.get("User-Agent", "")[:NAME_LENGTH]
        if agent.startswith("Mozilla/"):
            agent = "a browser"  # all browsers begin with this name, followed by a long list
        return APIRequest(
            path,
            query,
            bytes(self._body),
            self.request.headers.get("Content-Type", ""),
            self._expected() if operation.is_conditional else None,
            f"{agent or 'a program'} at {self.request.remote_ip}",
        )

    def _expected(self) -> int | None:
        """Return the version in ``If-Match``; None if it is missing or ``*``."""
        given = self.request.headers.get("If-Match", "*").strip()
        if given == "*":
            return None
        found = _ETAG.fullmatch(given)
        if found is None:
            raise BadRequestError(f"If-Match: {given!r} must be the ETag of one response, such as '\"3\"'.")
        return int(found[1])

    def _is_allowed(self, operation: Operation) -> bool:
        """Return whether the request is allowed over HTTP; if not, it was answered with 403."""
        if not operation.changes or operation.is_guarded or settings.scheduler().http_changes:
            return True
        text = "Requests over HTTP change nothing here: daskserve.scheduler.http-changes is false in the "
        self.answer(403, {"message": f"{text}scheduler's Dask configuration."})
        return False

    async def _stream(self, instance: str | None, verb: str, message: dict[str, Any]) -> None:
        """Send events, or live metrics, until the client leaves."""
        if self._api.streams >= MAX_STREAMS:
            raise UnavailableError(f"There are {MAX_STREAMS} streams of events already; retry later.")
        self._api.streams += 1
        try:
            if verb == "live_metrics":
                await self._send_metrics(instance)
            else:
                await self._send_rows(instance, verb, message)
        finally:
            self._api.streams -= 1

    async def _send_metrics(self, instance: str | None) -> None:
        async with self._api.feeds.watch(instance) as feed:
            number = await feed.after(0)  # raises an error before the answer has begun
            self._begin_stream()
            try:
                while True:
                    self.write(feed.text())
                    async with asyncio.timeout(FLUSH_S):
                        await self.flush()
                    number = await feed.after(number)
            except (StreamClosedError, ServeError, TimeoutError):
                pass  # the client has left; see `_send_rows`
            finally:
                self.finish()

    def _begin_stream(self) -> None:
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("Cache-Control", "no-store")
        self.write(f"retry: {1000 * RETRY_AFTER_S}\n\n")

    async def _send_rows(self, instance: str | None, verb: str, message: dict[str, Any]) -> None:
        last = self.request.headers.get("Last-Event-ID", "")
        if verb == "logs" and last:
            message["after"] = last
        elif NUMBER.fullmatch(last):
            message["after"] = int(last)
        takes_s = may_take_s(verb, message)
        message.pop("wait_s", None)  # the stream begins at once, even if there is nothing to send yet
        found = await self._api.access.call(instance, verb, message, takes_s)
        self._begin_stream()
        message.pop("since_s", None)  # applies to the first answer only
        try:
            while True:
                self.write(_event_texts(found) if verb == "events" else _log_texts(found))
                async with asyncio.timeout(FLUSH_S):
                    await self.flush()
                message["after"] = found["next"]
                try:
                    found = await self._api.access.call(
                        instance, verb, {**message, "wait_s": SILENCE_S}, SILENCE_S
                    )
                except UnavailableError:
                    found = {"events": [], "records": [], "next": message["after"]}
                    await asyncio.sleep(RETRY_AFTER_S)
        except (StreamClosedError, ServeError, TimeoutError):
            pass  # the client has left or does not read, or the instance has ended
        finally:
            self.finish()

    def on_connection_close(self) -> None:
        """Do nothing: the next write of a stream finds that it is closed."""

    def answer(self, status: int, body: Any) -> None:
        if isinstance(body, Document):
            self.set_status(status)
            self.set_header("Content-Type", f"{body.content_type}; charset=utf-8")
            self.set_header("Content-Security-Policy", body.policy)
            self.finish(body.text)
            return
        if status == UnavailableError.http_status:
            self.set_header("Retry-After", str(RETRY_AFTER_S))
        self.set_etag_header()  # Tornado sets it for GET only
        super().answer(status, body)

    def compute_etag(self) -> str | None:
        return None if self._version is None else f'"{self._version}"'

    def check_etag_header(self) -> bool:
        """Return False: the status changes even if the declared version does not."""
        return False

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        if status_code == 405:
            self.set_header("Allow", ", ".join(sorted(self._operations)))
            self._reason = "Method Not Allowed"
        self.answer(status_code, {"message": self._reason})


class DocumentHandler(GuardedHandler):
    """Answers with the OpenAPI document, its page, or the version of Ray Serve's API."""

    def initialize(self, guard: SiteGuard) -> None:
        self._guard = guard

    def get(self) -> None:
        if self.is_refused():
            return
        if self.request.path.endswith(DOCUMENT_PATH):
            self.answer(200, document())
        elif self.request.path.endswith(RAY_VERSION_PATH):
            versions = {"version": "4", "ray_version": RAY_VERSION, "ray_commit": "", "session_name": ""}
            self.answer(200, versions)
        else:
            self.set_header("Content-Type", "text/html; charset=utf-8")
            self.set_header("Content-Security-Policy", _POLICY)
            self.finish(page("../" if self.request.path.endswith("/") else ""))


def _event_texts(found: Mapping[str, Any]) -> str:
    texts = [
        f"id: {each['number']}\nevent: {each['kind']}\ndata: {json.dumps(each)}\n\n"
        for each in found["events"]
    ]
    return "".join(texts) or SILENT


def _log_texts(found: Mapping[str, Any]) -> str:
    texts = [f"event: log\ndata: {json.dumps(each)}\n\n" for each in found["records"]]
    if texts:
        # Only the last record gets the cursor, because it is long and means the position after all records.
        texts[-1] = f"id: {found['next']}\n{texts[-1]}"
    return "".join(texts) or SILENT
