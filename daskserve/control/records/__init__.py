"""The persistent state of an instance: its records, their indexes, their encoding, and the one writer."""
