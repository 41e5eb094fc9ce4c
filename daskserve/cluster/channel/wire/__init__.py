"""The bytes of a channel: frames, parts, shared memory and the socket's transport."""
