"""What a program defines: deployments, their graph, and the specs that travel to the controller."""
