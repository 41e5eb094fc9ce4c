"""A program's connection to an instance, and its calls to the controller."""
