"""The options of users, each defined once, and checked where they are written."""
