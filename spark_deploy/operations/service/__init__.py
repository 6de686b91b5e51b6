"""What is ensured of our services: tools, jobs, gateway, releases."""
