"""The methods of a client: applications, deployments, backends, endpoints and handles."""
