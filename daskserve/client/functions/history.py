"""The functions of ``import daskserve as serve`` for the history of an instance."""

from __future__ import annotations

from daskserve.client.client import ClientVerbs
from daskserve.client.functions.discovery import of_default
from daskserve.client.functions.forms import awaitable, blocking

history = blocking(of_default(ClientVerbs.history))
history_async = awaitable(of_default(ClientVerbs.history))
rollback = blocking(of_default(ClientVerbs.rollback))
rollback_async = awaitable(of_default(ClientVerbs.rollback))
events = blocking(of_default(ClientVerbs.events))
events_async = awaitable(of_default(ClientVerbs.events))
