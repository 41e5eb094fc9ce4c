"""What the commands of operators do: deploy, delete, scale, restart, roll out."""
