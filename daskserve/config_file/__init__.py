"""The file that describes what an instance runs: its text, its checks, its JSON Schema."""
