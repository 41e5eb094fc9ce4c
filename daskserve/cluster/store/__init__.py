"""The durable records of an instance."""
