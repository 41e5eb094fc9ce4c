"""One backend: which replicas start and stop next, with gangs, ranks and applications. Pure."""
