"""WebSockets: the session, its connection, and the received messages."""
