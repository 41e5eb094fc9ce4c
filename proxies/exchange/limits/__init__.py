"""The limits that clients meet, and the turns of event loops."""
