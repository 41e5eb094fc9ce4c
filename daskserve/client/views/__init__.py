"""What a program reads: status, explanations and progress, for terminals and notebooks."""
