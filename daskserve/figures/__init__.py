"""The metrics of daskserve: their table, what counts them, and the collector that exports them."""
