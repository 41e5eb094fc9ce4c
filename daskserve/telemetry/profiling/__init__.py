"""Where user code spends its time and memory, and where it is stuck. Pure, except for reading frames."""
