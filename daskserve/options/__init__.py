"""The options, each defined once, and checked in the program that sets them."""
