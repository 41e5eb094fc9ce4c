"""What an instance must remember: its records, their indexes, their encoding, and the one writer."""
