"""The history of an instance: revisions of applications, and events. Pure."""
