"""``daskserve run --reload``: watches the files of a project, and deploys its applications when they change."""
