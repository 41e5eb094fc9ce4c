"""The commands of operators: deploy, delete, scale, restart, roll out."""
