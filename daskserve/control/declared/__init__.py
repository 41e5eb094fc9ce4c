"""The declared configuration: accepting it, planning and building it, and showing it."""
