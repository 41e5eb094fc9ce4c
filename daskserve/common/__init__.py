"""What all layers use: types, the clock, the settings, and numbers in messages."""
