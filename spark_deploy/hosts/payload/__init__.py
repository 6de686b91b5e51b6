"""What travels to hosts: tools, wheels, certificates, files that keep a host reachable."""
