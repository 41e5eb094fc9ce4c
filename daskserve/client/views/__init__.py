"""Status, explanations and progress, for terminals and notebooks."""
