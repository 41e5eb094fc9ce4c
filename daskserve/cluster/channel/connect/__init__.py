"""Opening a channel: dialling, detours, handshakes, and lost machines."""
