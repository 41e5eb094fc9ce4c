"""The API for programs: `serve.start`, `serve.run`, clients and deployments."""
