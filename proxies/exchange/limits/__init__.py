"""The limits of clients, and how connections share memory and event loops."""
