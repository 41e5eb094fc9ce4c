"""Many calls through one handle: batch inference with a bounded number of calls in flight."""
