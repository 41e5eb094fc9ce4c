"""What programs call: `serve.start`, `serve.run`, the client and the deployments."""
