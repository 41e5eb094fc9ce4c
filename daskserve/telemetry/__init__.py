"""The metrics of daskserve: their definitions, the counters behind them, and the collector."""
