"""HTTP messages: one request and its response, streams and WebSockets."""
