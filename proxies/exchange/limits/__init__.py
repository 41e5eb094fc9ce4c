"""The limits that clients meet, and the work that connections share an event loop for."""
