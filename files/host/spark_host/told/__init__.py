"""What a host tells a controller that asks."""
