"""Opening a channel: dialling, relays, handshakes, and lost machines."""
