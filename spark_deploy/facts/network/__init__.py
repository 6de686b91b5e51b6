"""What a host says of its network: ports, proxy, fabric, reach."""
