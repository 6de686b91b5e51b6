"""How a plan serves: command line, image, gateway, the release and its files. Pure."""
