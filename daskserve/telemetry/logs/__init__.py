"""Log records of a process: their fields, where they are written, and the last ones in memory."""
