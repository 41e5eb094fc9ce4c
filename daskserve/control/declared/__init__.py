"""The declared configuration: accepting, planning, building and showing it."""
