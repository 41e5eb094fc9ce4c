"""``daskserve run --reload``: follows the files of a project, and deploys it when they change."""
